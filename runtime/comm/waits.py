"""Notes what the main thread waits for, so that the watch can find out that the wait is in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from ..errors import RankMismatchError

Key = tuple[int, str, int]
"""Identifies a collective: number of the communicator, channel, and its number there."""


class Watch(Protocol):
    """Looks at the notes of this process periodically, in a thread."""

    def stop(self) -> None:
        """End the thread."""


class Helper(Protocol):
    """Has work to do for other ranks."""

    def advance(self) -> None:
        """Do what can be done without waiting."""


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
        self.make_watch: Callable[[Waits, int, int], Watch] | None = None
        """Makes and starts a watch for a rank and a world size. Without it notes are only taken."""
        self.seconds = 0.0
        """Adds up what the main thread has waited, where there is a watch."""
        self.on_stream: Callable[[Callable[[], object]], object] = lambda wait: wait()
        """Lets a stream wait for a collective; a clock may put marks around it."""
        self.helpers: WeakSet[Helper] = WeakSet()
        """Holds what has to go on while this rank waits."""
        self._watch: Watch | None = None
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
        if threading.get_ident() != self.main:
            yield
            return
        outer = self.now
        self._count += 1
        self.now, start = (self._count, key, what), time.perf_counter()
        try:
            yield
        finally:
            self.now = outer
            self.seconds += 0.0 if outer is not None else time.perf_counter() - start

    def check(self) -> None:
        """Do what other ranks wait for; raise RankMismatchError once this rank is known to wait in vain."""
        for helper in list(self.helpers):
            helper.advance()
        if self.verdict is not None:
            raise RankMismatchError(self.verdict)

    def start_watch(self, rank: int, world_size: int) -> None:
        """Start a watch, once in a process."""
        if self._watch is None and world_size > 1 and self.make_watch is not None:
            self.main = threading.get_ident()
            self._watch = self.make_watch(self, rank, world_size)

    def stop_watch(self) -> None:
        """End the watch."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self.verdict = None


waits = Waits()
