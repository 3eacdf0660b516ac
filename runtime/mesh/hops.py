"""Begins the second hop of a collective when its first hop is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm.link import Note
from ..comm.pending import DONE, Pending
from ..comm.waits import waits

_PAUSE_S = 0.0002
_LOOK_S = 1.0

Hop = Callable[[], Pending]
"""Starts one hop."""


class Relay:
    """Begins second hops on a CPU, in the order in which the collectives were begun: that order is common to
    all ranks, while the order in which first hops end is not.
    """

    def __init__(self, advance_all: Callable[[], None]) -> None:
        """Take what advances this relay and everything else that other ranks may wait for."""
        self._advance_all = advance_all
        self._queue: deque[_Relayed] = deque()

    def add(self, first: Pending, second: Hop, note: Note) -> Pending:
        """Return a collective whose first hop is under way."""
        relayed = _Relayed(first, second, note, self._advance_all)
        self._queue.append(relayed)
        self.advance()
        return relayed

    def advance(self) -> None:
        """Begin what can be begun, without waiting."""
        while self._queue and self._queue[0].first.ready:
            self._queue.popleft().begin_second()

    @property
    def is_empty(self) -> bool:
        """Tell whether all second hops have begun."""
        return not self._queue


class _Relayed(Pending):
    __slots__ = ("_advance_all", "_note", "_second", "_start", "first")

    def __init__(self, first: Pending, start: Hop, note: Note, advance_all: Callable[[], None]) -> None:
        self.first, self._start, self._note, self._advance_all = first, start, note, advance_all
        self._second: Pending | None = None

    def begin_second(self) -> None:
        self.first.wait()
        self._second, self.first = self._start(), DONE

    @property
    def ready(self) -> bool:
        self._advance_all()
        return self._second is not None and self._second.ready

    def wait(self) -> None:
        with waits.waiting(*self._note):
            advance_until(lambda: self.ready, self._advance_all)
            assert self._second is not None
            self._second.wait()


def advance_until(over: Callable[[], bool], advance: Callable[[], None]) -> None:
    """Advance everything until ``over()``. Raises RankMismatchError once the wait is known to be in vain."""
    look = time.monotonic() + _LOOK_S
    while not over():
        advance()
        time.sleep(_PAUSE_S)
        if time.monotonic() > look:
            waits.check()
            look = time.monotonic() + _LOOK_S


def follow(side: torch.cuda.Stream) -> None:
    """Let a stream wait for what the current stream has been given."""
    side.wait_stream(torch.cuda.current_stream(side.device))


class OnStream(Pending):
    """Represents hops that follow each other on a stream of a GPU, which the host does not wait for."""

    def __init__(self, side: torch.cuda.Stream, hops: Sequence[Hop], *keep: Tensor) -> None:
        """Start the hops, after what the current stream has been given; ``keep`` lives until they are over
        for the stream that waits.
        """
        follow(side)
        with torch.cuda.stream(side):
            for hop in hops:
                hop().wait()
            self.work = torch.cuda.Event()  # type: ignore[no-untyped-call]
            """Lets a stream wait for the hops, without an end of what is kept for them."""
            self.work.record(side)
        self._keep = keep

    def wait(self) -> None:
        waits.on_stream(self.work.wait)
        self._keep = ()
