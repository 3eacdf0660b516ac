"""Counts and times collectives by kind and size, and prints a table of them.

What takes part in a collective must never wait for the sake of a time: gathers and reductions have no order
in common between ranks. Times therefore come in later, by callbacks and events, and are put into the table by
:meth:`CommsLogger.poll`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm, MakeLink
from ..comm.link import RankLink
from ..comm.pending import Pending
from ..comm.shared_memory import SharedMemory
from ..config.schema import CommsLoggerSection
from ..log import show, warn

# -- comms logger -----------------------------------------------------------------------------------


CommKey = tuple[str, int, int, str]
"""Identifies a row: the operation, its bytes, the number of ranks, the calling place ("" without debug)."""
_BETWEEN = ("zlaunch.runtime.comm.", "zlaunch.runtime.observe.", "zlaunch.compat.deepspeed.", "contextlib")
"""Modules between a calling place and the log."""
_loggers: list[CommsLogger] = []
"""Lists the logs of the engines that exist, the newest last."""
_numbers = count(1)


def bus_share(kind: str, ranks: int) -> float:
    """Return by what the size over the time is multiplied to give the bandwidth that a link has to have,
    as nccl-tests does.
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


@dataclass(slots=True)
class CommRow:
    """Sums up equal operations. The latest of them may not have ended, and then have no time yet."""

    count: int = 0
    timed: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class LoggedOperation:
    """Represents one operation under way."""

    key: CommKey
    label: str
    start: float
    seconds: float = 0.0
    """Adds up what is known of its time so far."""


class CommsLogger:
    """Keeps the table of one engine."""

    def __init__(self, section: CommsLoggerSection, *, prints: bool) -> None:
        """Begin to log what ``section`` asks for; ``prints`` on one rank."""
        self.number = next(_numbers)
        self.rows: dict[CommKey, CommRow] = {}
        self._kinds = None if section.prof_all else frozenset(section.prof_ops)
        self._names_places = section.debug
        self._prints = prints
        self._says_each = section.verbose and prints
        self._ended: deque[tuple[LoggedOperation, float]] = deque()
        self._unread: deque[tuple[LoggedOperation, Any, Any]] = deque()
        """Holds events before and after operations of a device, in the order of issue."""
        # autograd has threads of its own, and the cycle collector may finish a log at any point
        self._lock = threading.RLock()
        _loggers.append(self)

    def wants(self, kind: str) -> bool:
        """Tell whether the config asks for operations of a kind."""
        return self._kinds is None or kind in self._kinds

    # -- one operation

    def begin(self, kind: str, nbytes: int, ranks: int, label: str = "") -> LoggedOperation:
        """Count an operation that is about to start. ``label`` names what it is about, for its line."""
        self.poll()
        key = (kind, nbytes, ranks, _calling_place() if self._names_places else "")
        with self._lock:
            self.rows.setdefault(key, CommRow()).count += 1
        return LoggedOperation(key, label, time.perf_counter())

    def end(self, operation: LoggedOperation, seconds: float | None = None) -> None:
        """Note that an operation has ended, now or after ``seconds``. Any thread may call it."""
        taken = time.perf_counter() - operation.start if seconds is None else seconds
        self._ended.append((operation, taken))

    def end_with(self, operation: LoggedOperation, work: Any) -> bool:
        """Let an operation end when a torch Work of the host does; return False where that cannot be seen."""
        try:
            future = work.get_future()
        except RuntimeError:  # some of gloo's have none
            return False
        future.add_done_callback(lambda _: self.end(operation))
        return True

    def end_between(self, operation: LoggedOperation, before: Any, after: Any) -> None:
        """Let an operation take the time between two events of the device, which are read later."""
        self._unread.append((operation, before, after))

    @contextmanager
    def timing(
        self, kind: str, nbytes: int, ranks: int, *, on_gpu: bool, label: str = ""
    ) -> Iterator[LoggedOperation]:
        """Log an operation that has ended at the end of the context, for the host or the current stream."""
        operation = self.begin(kind, nbytes, ranks, label)
        before, after = (timed_event(), timed_event()) if on_gpu else (None, None)
        if before is not None:
            before.record()
        try:
            yield operation
        except BaseException:
            self.rows[operation.key].count -= 1  # it has not been an operation
            raise
        if before is None or after is None:
            self.end(operation)
        else:
            after.record()
            self.end_between(operation, before, after)

    def poll(self, *, wait: bool = False) -> None:
        """Put the times of what has ended into the rows; ``wait`` for the events of a device."""
        with self._lock:
            while self._unread and (wait or self._unread[0][2].query()):
                operation, before, after = self._unread.popleft()
                if wait:
                    after.synchronize()
                self._ended.append((operation, before.elapsed_time(after) / 1e3))
            while self._ended:
                operation, seconds = self._ended.popleft()
                row = self.rows.get(operation.key)
                if row is None:  # the rows were reset while it was under way
                    continue
                row.timed += 1
                row.seconds += seconds
                if self._says_each:
                    show(_line(operation, seconds))

    # -- all of them

    def reset(self) -> None:
        """Forget what has been logged."""
        self.poll()
        with self._lock:
            self.rows.clear()

    def finish(self, *, wait: bool) -> None:
        """Print the table and log nothing more; a second call does nothing."""
        with self._lock:
            if self not in _loggers:
                return
            _loggers.remove(self)
            if wait:
                self.poll(wait=True)
            self.show()

    def show(self, least: Mapping[CommKey, float] | None = None) -> None:
        """Print the table on the rank that does. ``least``: the shortest time of any rank for each row."""
        if self._prints:
            for line in table(self.rows, self.number, least):
                show(line)


def timed_event() -> Any:
    """Make an event of the device that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def newest_log() -> CommsLogger | None:
    """Return the log of the newest engine, into which a script's own operations go; None without one."""
    return _loggers[-1] if _loggers else None


def log_summary(show_straggler: bool = False) -> None:
    """Print the log so far on rank 0. Logging continues.

    ``show_straggler``: add the time that rank 0 took beyond the fastest rank, which is mostly waiting for
    stragglers. Collective then.
    """
    logs = list(_loggers)
    if not logs:
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn("log_summary: nothing is logged: set comms_logger.enabled in the engine's config")
        return
    for log in logs:
        log.poll(wait=True)
    if not show_straggler:
        for log in logs:
            log.show()
        return
    mine = {
        log.number: {key: row.seconds for key, row in log.rows.items() if row.timed == row.count}
        for log in logs
    }
    everyone: list[Any] = [mine] * dist.get_world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    for log in logs:
        found = [each[log.number] for each in everyone if log.number in each]
        shared = set(found[0]).intersection(*found)
        log.show({key: min(each[key] for each in found) for key in shared})


def reset_log() -> None:
    """Clear the log."""
    for log in _loggers:
        log.reset()


def count_operations() -> int:
    """Return how many operations have been logged."""
    return sum(row.count for log in _loggers for row in log.rows.values())


def table(
    rows: Mapping[CommKey, CommRow], number: int = 1, least: Mapping[CommKey, float] | None = None
) -> list[str]:
    """Return the lines of a table; see :meth:`CommsLogger.show`."""
    if not rows:
        return ["zlaunch: comms_logger: no operations logged"]
    head = ["operation", "size", "ranks", "count", "total ms", "mean ms", "algbw GB/s", "busbw GB/s"]
    cells = [head + ["wait ms"] * (least is not None)]
    for key, row in sorted(rows.items()):
        kind, nbytes, ranks, _ = key
        speed = nbytes * row.timed / row.seconds / 1e9 if row.seconds and nbytes else None
        line = [kind, _size(nbytes), str(ranks), str(row.count), f"{row.seconds * 1e3:.2f}"]
        line.append(f"{row.seconds / row.timed * 1e3:.3f}" if row.timed else "-")
        line += ["-", "-"] if speed is None else [f"{speed:.3g}", f"{speed * bus_share(kind, ranks):.3g}"]
        if least is not None:
            line.append(f"{(row.seconds - least[key]) * 1e3:.2f}" if key in least else "-")
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    places = ["place", *(key[3] for key in sorted(rows))]
    lines = [f"zlaunch: collectives of engine {number}, timed on rank 0"]
    for line, place in zip(cells, places, strict=True):
        name, *numbers = (f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        end = f"  {place}" if any(places[1:]) else ""
        lines.append(f"  {line[0]:<{len(name)}}  {'  '.join(numbers)}{end}")
    unknown = sum(row.count - row.timed for row in rows.values())
    if unknown:
        lines.append(
            f"  {unknown} operations are untimed: they have not ended, or no code has waited for them"
        )
    return lines


def _line(operation: LoggedOperation, seconds: float) -> str:
    kind, nbytes, ranks, place = operation.key
    text = f"zlaunch: {kind} of {_size(nbytes)}, {ranks} ranks: {seconds * 1e3:.3f} ms"
    if nbytes and seconds:
        speed = nbytes / seconds / 1e9
        text += f", {speed:.3g} GB/s, bus {speed * bus_share(kind, ranks):.3g} GB/s"
    return text + "".join(f", {more}" for more in (operation.label, place) if more)


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def _calling_place() -> str:
    """Return the place outside of the log and the communicator that has asked for a collective."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", "?")).removeprefix("zlaunch.runtime.")
    return f"{module}.{frame.f_code.co_name}:{frame.f_lineno}"


# -- logged comm ------------------------------------------------------------------------------------
#
# Runs an engine's collectives and logs each of them.
#
# What a time is depends on who does the work:
#
# - gloo: from the call until its threads have ended the operation;
# - NCCL: on the device, from where the calling stream stands at the call until the operation has ended.
# That
#   includes waiting for the other ranks, and for earlier operations of the same group;
# - shared memory between CPU ranks, and what takes two hops between them: what this rank spends in the call
# and
#   in waiting for the result. Of a ``drain``, in which it finishes all that it has begun, each logged
#   operation
#   under way gets a share by its bytes.


class LoggedComm(Comm):
    """Runs the collectives of one engine and logs them, but for exchanges of Python objects."""

    def __init__(
        self,
        section: CommsLoggerSection,
        device: torch.device,
        *,
        connect: Callable[..., SharedMemory | None] | None = None,
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
        seconds = time.perf_counter() - start
        total = sum(operation.key[1] for operation in self._open)
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
        before = timed_event()
        after = timed_event()
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
        self._pending = pending
        self._comm = comm
        self._operation = operation

    def wait(self) -> None:
        start = time.perf_counter()
        self._pending.wait()
        self._comm.end(self._operation, time.perf_counter() - start)


def _torch_work(pending: Any) -> Any:
    """Return the torch Work behind a collective and what follows it; None where there are several."""
    while pending is not None and not hasattr(pending, "work"):
        pending = getattr(pending, "before", None)
    return None if pending is None else pending.work
