"""Runs an engine's collectives and logs each of them.

What a time is depends on who does the work:

- gloo: from the call until its threads have ended the operation;
- NCCL: on the device, from where the calling stream stands at the call until the operation has ended. That
  includes waiting for the other ranks, and for earlier operations of the same group;
- shared memory between CPU ranks, and what takes two hops between them: what this rank spends in the call and
  in waiting for the result. Of a ``drain``, in which it finishes all that it has begun, each logged operation
  under way gets a share by its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..comm.collectives import Comm, MakeLink
from ..comm.link import RankLink
from ..comm.peer_memory import Connect
from ..comm.pending import Pending
from ..config.profilers import CommsLoggerSection
from .comms_logger import CommsLogger, LoggedOperation, timed_event


class LoggedComm(Comm):
    """Runs the collectives of one engine and logs them, but for exchanges of Python objects."""

    def __init__(
        self,
        section: CommsLoggerSection,
        device: torch.device,
        *,
        connect: Connect | None = None,
        share: bool = True,
        mesh: MakeLink | None = None,
    ) -> None:
        super().__init__(device, connect=connect, share=share, mesh=mesh)
        self._on_gpu = device.type == "cuda"
        self.log = CommsLogger(section, prints=self.rank == 0)
        self._sides: dict[str, Any] = {}
        """Holds a stream for each kind. Operations of one group end in order, so that on a stream of its own
        nothing holds an event up but the operation before it.
        """
        self._open: dict[LoggedOperation, None] = {}
        """Lists what goes through shared memory and has not been waited for."""
        self._forgotten = finalize(self, self.log.finish, wait=False)

    def all_gather(self, full: Tensor, source: Tensor, label: int = 0, rounded: bool = False) -> Pending:
        start = super().all_gather
        return self._run("all_gather", full.nbytes, label, lambda: start(full, source, label, rounded))

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int = 0) -> Pending:
        start = super().reduce_scatter
        return self._run("reduce_scatter", bucket.nbytes, label, lambda: start(shard, bucket, label))

    def all_reduce(self, tensor: Tensor, label: int = 0) -> Pending:
        start = super().all_reduce
        return self._run("all_reduce", tensor.nbytes, label, lambda: start(tensor, label))

    def all_reduce_scalars(self, tensor: Tensor, what: str = "sums up a step's numbers") -> Tensor:
        start = super().all_reduce_scalars
        self._run_whole("all_reduce", tensor.nbytes, "a step's numbers", lambda: start(tensor, what))
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0, among: RankLink | None = None) -> None:
        start = super().broadcast
        if tensor.numel():
            self._run_whole("broadcast", tensor.nbytes, "", lambda: start(tensor, source, among))

    def barrier(self) -> None:
        self._run_whole("barrier", 0, "", super().barrier)

    def drain(self) -> bool:
        start = time.perf_counter()
        result = super().drain()
        seconds, total = time.perf_counter() - start, sum(operation.key[1] for operation in self._open)
        for operation in list(self._open):
            self.end(operation, seconds * operation.key[1] / max(total, 1))
        return result

    def close(self) -> None:
        self.log.finish(wait=True)
        self._forgotten.detach()
        super().close()

    def observe(self, kind: str, nbytes: int, start: Callable[[], Pending]) -> Pending:
        return self._run(kind, nbytes, "of the optimizer", start)

    def _run(self, kind: str, nbytes: int, label: int | str, start: Callable[[], Pending]) -> Pending:
        """Start a collective and let its end be seen."""
        if self.world_size == 1 or not self.log.wants(kind):
            return start()
        name = label if isinstance(label, str) else self._labels[label]
        operation = self.log.begin(kind, nbytes, self.world_size, name)
        if self._on_gpu:
            return self._run_on_gpu(kind, operation, start)
        pending = start()
        work = _torch_work(pending)
        if self.shared or work is None:
            operation.seconds = time.perf_counter() - operation.start
            self._open[operation] = None
            return _Awaited(pending, self, operation)
        self.log.end_with(operation, work)
        return pending

    def _run_on_gpu(self, kind: str, operation: LoggedOperation, start: Callable[[], Pending]) -> Pending:
        before, after = timed_event(), timed_event()
        before.record()
        pending = start()
        side = self._sides.get(kind)
        if side is None:
            side = self._sides[kind] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # torch drops its own hold on an operation's tensors once a stream waits for it. Work holds what is
        # sent, the caller what is filled, until the stream that uses it waits.
        with torch.cuda.stream(side):
            _torch_work(pending).wait()
            after.record()
        self.log.end_between(operation, before, after)
        return pending

    def _run_whole(self, kind: str, nbytes: int, label: str, run: Callable[[], object]) -> None:
        """Run a collective that is waited for at once."""
        if self.world_size == 1 or not self.log.wants(kind):
            run()
            return
        on_gpu = self._on_gpu and kind != "barrier"  # which the host waits for
        with self.log.timing(kind, nbytes, self.world_size, on_gpu=on_gpu, label=label):
            run()

    def end(self, operation: LoggedOperation, seconds: float) -> None:
        """Note that an operation has been waited for, which took ``seconds``, the first time."""
        if operation in self._open:
            del self._open[operation]
            self.log.end(operation, operation.seconds + seconds)


class _Awaited(Pending):
    """Represents a collective through shared memory, and times the wait for it."""

    __slots__ = ("_comm", "_operation", "_pending")

    def __init__(self, pending: Pending, comm: LoggedComm, operation: LoggedOperation) -> None:
        self._pending, self._comm, self._operation = pending, comm, operation

    def wait(self) -> None:
        start = time.perf_counter()
        self._pending.wait()
        self._comm.end(self._operation, time.perf_counter() - start)


def _torch_work(pending: Any) -> Any:
    """Return the torch Work behind a collective and what follows it; None where there are several."""
    while pending is not None and not hasattr(pending, "work"):
        pending = getattr(pending, "before", None)
    return None if pending is None else pending.work
