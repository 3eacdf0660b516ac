"""Watch for nodes that no longer answer.

`controller` decides what follows; `node/uplink.py` is what a node does when it no longer hears from here.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zlaunch.supervisor.nodes import Link
from zlaunch.system import boot_clock
from zlaunch.system.events import Event

_PINGS_PER_PERIOD = 4
_NOTE_EVERY_S = 60.0
_PAUSE_S = 86400.0
"""Seconds that the nodes wait for a launcher that has been stopped in its terminal (Ctrl-Z)."""
_LATE_S = 0.5
"""Seconds beyond a lease's end: for clocks that do not run alike, and for the last process to die."""


class Heartbeat:
    """Pings every agent from its own thread, grants each its lease (Note [Lease] in `zlaunch/node/lease.py`),
    and reports those that have been silent for a period.

    A period of 0 means that there is nothing to watch: the agents are on this machine.
    """

    def __init__(
        self, links: Sequence[Link], period_s: float, events: queue.SimpleQueue[tuple[int, Event]]
    ) -> None:
        self._links, self._period_s, self._events = links, period_s, events
        self._heard = [boot_clock.now_s()] * len(links)
        self._noted = [-math.inf] * len(links)
        self._excused = [False] * len(links)
        self._long_until = [0.0] * len(links)
        """Until when nodes have a longer lease, because this process was stopped in its terminal."""
        self._pauses = 0
        self._given_up: set[int] = set()
        self._end = threading.Event()
        self._sending = threading.RLock()
        self._paused = False

    def start(self) -> None:
        """Start the thread, if there is anything to watch."""
        if self._period_s > 0:
            self._heard = [boot_clock.now_s()] * len(self._links)
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()

    @property
    def watches(self) -> bool:
        """Tell whether there is anything to watch."""
        return self._period_s > 0

    def pause(self) -> None:
        """Stop the pings, which would tell the nodes that this process continues, and grant a long lease."""
        with self._sending:
            self._paused = True
            self._pauses += 1
        for index, link in enumerate(self._links):
            if index in self._given_up:
                continue
            if self.watches:
                self._long_until[index] = boot_clock.now_s() + _PAUSE_S
            link.transport.send({"cmd": "pause", "lease": self._grant(index)})

    def resume(self) -> None:
        """Ping the nodes after a pause: the leases are short again."""
        self.forgive()
        for index in range(len(self._links)):
            self._ping(index)

    def forgive(self) -> None:
        """Count anew from now: this process stood still, so it has not heard the nodes."""
        self._paused = False
        self._heard = [boot_clock.now_s()] * len(self._links)

    def heard(self, index: int, event: Event | None = None) -> None:
        """Record that a node has sent something."""
        self._heard[index] = boot_clock.now_s()
        if event is not None and event.get("pauses") == self._pauses:
            self._long_until[index] = 0.0  # it knows that the last pause is over

    def first_grant(self, index: int) -> float | None:
        """Return the lease that goes out with a node's plan now."""
        self.heard(index)
        return self._grant(index)

    def give_up(self, index: int) -> float:
        """Grant a node nothing more. Return when all its workers are dead, whatever becomes of it; 0 without
        a lease.
        """
        with self._sending:
            self._given_up.add(index)
        return self.lease_ends(index)

    def lease_ends(self, index: int) -> float:
        """Return when all workers of a node are dead if nothing more is granted; 0 without a lease."""
        if not self.watches:
            return 0.0
        return max(self._until(index), self._long_until[index]) + _LATE_S

    def _until(self, index: int) -> float:
        """Return when a lease ends that is granted now."""
        last = boot_clock.now_s() if self._excused[index] else self._heard[index]
        return last + self._period_s

    def _grant(self, index: int) -> float | None:
        """Return a lease: the moment when it ends, on the agent's clock."""
        ahead_s = self._links[index].clock.ahead_s
        if ahead_s is None or not self.watches:
            return None
        return (self._long_until[index] if self._paused else self._until(index)) - ahead_s

    def _ping(self, index: int) -> None:
        with self._sending:
            if not self._paused and index not in self._given_up:
                ping = {"cmd": "ping", "lease": self._grant(index), "pauses": self._pauses}
                self._links[index].transport.send(ping)

    @contextmanager
    def excused(self, index: int) -> Iterator[None]:
        """Forgive a node's silence while this side does not listen to it."""
        self._excused[index] = True
        try:
            yield
        finally:
            self.heard(index)
            self._excused[index] = False

    def worth_noting(self, index: int) -> bool:
        """Tell whether an answer of this node belongs into the log: not every one, for long runs."""
        now = boot_clock.now_s()
        if now - self._noted[index] < _NOTE_EVERY_S:
            return False
        self._noted[index] = now
        return True

    def silence_s(self, index: int) -> float:
        """Return the seconds since the node was last heard."""
        return boot_clock.now_s() - self._heard[index]

    def _run(self) -> None:
        reported: set[int] = set()
        pause_s = self._period_s / _PINGS_PER_PERIOD
        looked_at = boot_clock.now_s()
        while not self._end.wait(pause_s):
            now = boot_clock.now_s()
            if now - looked_at > 2 * pause_s:
                self.forgive()
            looked_at = now
            for index in range(len(self._links)):
                self._ping(index)
                silence_s = self.silence_s(index)
                if silence_s > self._period_s and not self._excused[index] and index not in reported:
                    reported.add(index)
                    self._events.put((index, {"type": "silent", "silence_s": silence_s}))
