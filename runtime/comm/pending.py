"""Represents collectives that are under way, and waits for them while the watch looks."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankMismatchError

if TYPE_CHECKING:
    from .deadlock import DeadlockWatch
    from .two_hops import TwoHops

# -- waits ------------------------------------------------------------------------------------------
#
# Notes what the main thread waits for, so that the watch can find out that the wait is in vain.


Key = tuple[int, str, int]
"""Identifies a collective: number of the communicator, channel, and its number there."""


class Waits:
    """Keeps the notes of this process."""

    def __init__(self) -> None:
        self.started: dict[str, int] = {}
        """Counts the collectives of a channel ("communicator/channel") that this rank has started."""
        self.now: tuple[int, Key, str] | None = None
        """Keeps the present wait: its number, the collective, and what it does in words."""
        self.verdict: str | None = None
        """Says why this rank waits in vain, once that is known."""
        self.main: int | None = None
        """Identifies the thread whose waits are noted, once there is a watch."""
        self.make_watch: Callable[[Waits, int, int], DeadlockWatch] | None = None
        """Makes a watch for a rank and a world size. Without it notes are only taken."""
        self.seconds = 0.0
        """Adds up what the main thread has waited, where there is a watch."""
        self.on_stream: Callable[[Callable[[], object]], object] = lambda wait: wait()
        """Lets a stream wait for a collective; a clock may put marks around it."""
        self.helpers: WeakSet[TwoHops] = WeakSet()
        """Holds what has to go on while this rank waits."""
        self._watch: DeadlockWatch | None = None
        self._count = 0

    def next_key(self, comm: int, channel: str) -> Key:
        """Number the next collective of a channel, which is started now."""
        name = f"{comm}/{channel}"
        number = self.started.get(name, 0)
        self.started[name] = number + 1
        return comm, channel, number

    @contextmanager
    def waiting(self, key: Key, what: str) -> Iterator[None]:
        """Note that the main thread waits for a collective inside the context."""
        # Other threads (saves, the step in the background) may wait at the same time. The watch judges the
        # main thread alone.
        if threading.get_ident() != self.main:
            yield
            return
        outer = self.now
        self._count += 1
        self.now = (self._count, key, what)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.now = outer
            # The outer wait counts the time of those inside it.
            self.seconds += 0.0 if outer is not None else time.perf_counter() - start

    def check(self) -> None:
        """Do what other ranks wait for; raise RankMismatchError once this rank is known to wait in vain."""
        # Before the verdict: another rank may wait for a hop that only this rank can begin.
        for helper in list(self.helpers):
            helper.advance()
        if self.verdict is not None:
            raise RankMismatchError(self.verdict)

    def start_watch(self, rank: int, world_size: int) -> None:
        """Start a watch, once in a process."""
        if self._watch is None and world_size > 1 and self.make_watch is not None:
            self.main = threading.get_ident()
            self._watch = self.make_watch(self, rank, world_size)
            self._watch.start()

    def stop_watch(self) -> None:
        """End the watch."""
        watch = self._watch
        self._watch = None
        if watch is not None:
            watch.stop()
        self.verdict = None


waits = Waits()


# -- pending ----------------------------------------------------------------------------------------


_LOOK = timedelta(seconds=1)


class Pending:
    """Represents something under way. This base class represents what has already ended."""

    __slots__ = ()

    def wait(self) -> None:
        """Wait until the result may be used: by the current stream, where a device does the work."""

    def synchronize(self) -> None:
        """Block the host until the result is there."""
        self.wait()

    @property
    def ready(self) -> bool:
        """Tell whether ``wait`` would not block for the work of another thread."""
        return True

    @property
    def refuses(self) -> bool:
        """Tell whether ``wait`` would raise an error now, on all ranks alike."""
        return False

    @property
    def event(self) -> torch.cuda.Event | None:
        """Return the event behind a copy, for a stream to wait for; None if there is none."""
        return None

    def then(self, function: Callable[[], object]) -> Pending:
        """Return this work followed by ``function``, which is called once, by the first ``wait``."""
        return _Then(self, function)


DONE = Pending()
"""Represents what has already ended."""


class _Then(Pending):
    __slots__ = ("_function", "before")

    def __init__(self, before: Pending, function: Callable[[], object]) -> None:
        self.before = before
        self._function = function

    @property
    def ready(self) -> bool:
        return self.before.ready

    def wait(self) -> None:
        self.before.wait()
        function = self._function
        # Both before the call: it runs once, even if it fails, and the tensors of the work before it are
        # released.
        self._function = _nothing
        self.before = DONE
        function()


def _nothing() -> None:
    return None


Exchange = Callable[[object], "list[Any]"]
"""Returns every rank's picklable value, in rank order. Collective."""


def await_work(work: Any, key: Key, what: str) -> None:
    """Wait for a torch Work; note the wait, and raise once it is known to be in vain.

    The Work is not asked first whether it has ended: torch holds the GIL while it answers, and a thread of
    gloo that ends a Work inside torch's profiler waits for the GIL before it lets go of the Work.
    """
    if work is None:
        return
    with waits.waiting(key, what):
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
                waits.check()
                if work.is_completed():  # ended meanwhile, or because the group's time limit is over
                    work.wait()
                    return


class Work(Pending):
    """Waits for a torch Work and keeps its tensors alive until then."""

    __slots__ = ("_keep", "_key", "_what", "work")

    def __init__(self, work: Any, key: Key, what: str, *keep: Tensor) -> None:
        self.work = work
        self._key = key
        self._what = what
        self._keep = keep

    @property
    def ready(self) -> bool:
        # Not is_completed(): see await_work().
        return self.work is None or bool(self.work.get_future().done())

    def wait(self) -> None:
        if self.work is None:
            return
        if self._keep and self._keep[0].device.type != "cpu":
            waits.on_stream(self.work.wait)  # the stream waits, not the host
        else:
            await_work(self.work, self._key, self._what)
        self.work = None
        self._keep = ()


class Noted(Pending):
    """Waits for a transfer through shared memory, and notes the wait for the watch."""

    __slots__ = ("_key", "_transfer", "_what")

    def __init__(self, transfer: Pending, key: Key, what: str) -> None:
        self._transfer = transfer
        self._key = key
        self._what = what

    @property
    def ready(self) -> bool:
        return self._transfer.ready

    def wait(self) -> None:
        with waits.waiting(self._key, self._what):
            self._transfer.wait()


def sum_pieces(shard: Tensor, pieces: Tensor, first: int = 0) -> None:
    """Write the sum over axis 0 of ``pieces`` (n, s) to ``shard`` (s elements, any dtype).

    Row ``first`` comes before the others: sums in shared memory have that order, too.
    """
    # A fixed order, because the order of summation decides the bits of the result.
    rows = [pieces[first], *(pieces[i] for i in range(pieces.shape[0]) if i != first)]
    # One pass over memory for the first two.
    if len(rows) >= 2 and pieces.dtype == shard.dtype:
        torch.add(rows[0], rows[1], out=shard)
        rest = rows[2:]
    else:
        shard.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        shard.add_(row)


def exchange_objects(
    value: object, world_size: int, group: Any, key: Key, what: str, *, over_gloo: bool
) -> list[Any]:
    """Return every rank's picklable ``value``, in rank order."""
    if world_size == 1:
        return [value]
    if not over_gloo:
        values: list[Any] = [None] * world_size
        with waits.waiting(key, what):
            dist.all_gather_object(values, value, group=group)
        return values
    # Not all_gather_object(): it waits inside torch, where the verdict of the watch could not be raised.
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    mine = torch.tensor([own.numel()], dtype=torch.int64)
    await_work(dist.all_gather(sizes, mine, group=group, async_op=True), key, what)
    largest = max(int(size) for size in sizes)
    # gloo gathers tensors of one size.
    padded = torch.nn.functional.pad(own, (0, largest - own.numel()))
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    await_work(dist.all_gather(parts, padded, group=group, async_op=True), key, what)
    return [
        pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
    ]
