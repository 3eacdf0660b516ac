"""Give operations of the pretended GPU a length, and find where a stream stands still.

A clock of ``clocks.py`` also carries the time, under the key TIME: it is joined as everything else is, so a
stream that waits for an event has the event's time, or its own where that is later. The host takes no time,
except where it waits for a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .clocks import TIME, Actor, clocks, join, lock

Cost = Callable[[str, Sequence[Tensor], Sequence[Tensor]], int]
"""Returns the length of an operation in nanoseconds, from its name and the tensors it reads and writes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Describes an operation, or a time in which a stream waits for one. Times are in nanoseconds."""

    actor: Actor
    name: str
    start: int
    stop: int


@dataclass
class Timeline:
    """Keeps what streams have done and waited for since :meth:`begin`."""

    cost: Cost | None = None
    """Without it all operations take no time, and nothing is kept."""
    work: list[Span] = field(default_factory=list)
    stalls: list[Span] = field(default_factory=list)
    _ended: dict[int, str] = field(default_factory=dict)
    """Names the operation that ended at a time."""

    def begin(self, cost: Cost) -> None:
        """Begin to keep what happens, with these lengths."""
        self.cost = cost
        self.work.clear()
        self.stalls.clear()
        self._ended.clear()

    def now(self, actor: Actor) -> int:
        """Return the time at which what an actor has been given so far is done."""
        return clocks[actor].get(TIME, 0)

    def spend(self, actor: Actor, name: str, length: int) -> None:
        """Let an actor be busy for some nanoseconds."""
        if not length:
            return
        with lock:
            start = self.now(actor)
            clocks[actor][TIME] = start + length
            self.work.append(Span(actor, name, start, start + length))
            self._ended[start + length] = name

    def launched(self, actor: Actor, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Note an operation, which has the length that the cost says."""
        if self.cost is not None:
            self.spend(actor, name, self.cost(name, reads, writes))

    def wait(self, actor: Actor, clock: dict[Actor, int]) -> None:
        """Let an actor wait for what a clock knows of."""
        before = self.now(actor)
        join(clocks[actor], clock)
        after = self.now(actor)
        if self.cost is not None and after > before:
            self.stalls.append(Span(actor, self._ended.get(after, "the host"), before, after))


timeline = Timeline()
