"""Begins each hop of a collective when the one before is over."""

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
    """Begins the hops of collectives on a CPU, each when the one before is over. No collective begins a hop
    before those that were begun earlier have begun theirs: that order is common to all ranks, while the order
    in which hops end is not.
    """

    def __init__(self, advance_all: Callable[[], None]) -> None:
        """Take what advances this relay and everything else that other ranks may wait for."""
        self._advance_all = advance_all
        self._queue: deque[_Relayed] = deque()

    def add(self, hops: Sequence[Hop], note: Note) -> Pending:
        """Begin a collective."""
        relayed = _Relayed(hops, note, self._advance_all)
        self._queue.append(relayed)
        self.advance()
        return relayed

    def advance(self) -> None:
        """Begin what can be begun, without waiting."""
        before: _Relayed | None = None
        for relayed in list(self._queue):
            while relayed.left and (before is None or len(before.left) < len(relayed.left)):
                if not relayed.present.ready:
                    break
                relayed.begin_next()
            before = relayed
        while self._queue and not self._queue[0].left:
            self._queue.popleft()

    @property
    def is_empty(self) -> bool:
        """Tell whether all hops have begun."""
        return not self._queue


class _Relayed(Pending):
    __slots__ = ("_advance_all", "_note", "left", "present")

    def __init__(self, hops: Sequence[Hop], note: Note, advance_all: Callable[[], None]) -> None:
        self.left, self.present = deque(hops), DONE
        self._note, self._advance_all = note, advance_all

    def begin_next(self) -> None:
        self.present.wait()
        self.present = self.left.popleft()()

    @property
    def ready(self) -> bool:
        self._advance_all()
        return not self.left and self.present.ready

    def wait(self) -> None:
        with waits.waiting(*self._note):
            advance_until(lambda: self.ready, self._advance_all)
            self.present.wait()


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
