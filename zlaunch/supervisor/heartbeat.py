"""Watch for nodes that no longer answer.

`controller` decides what follows; `node/uplink.py` is what a node does when it no longer hears from here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zlaunch.supervisor.nodes import Link
from zlaunch.system.events import Event

_PINGS_PER_PERIOD = 4
_NOTE_EVERY_S = 60.0


class Heartbeat:
    """Pings every agent from its own thread and reports those that have been silent for a period.

    A period of 0 means that there is nothing to watch: the agents are on this machine.
    """

    def __init__(
        self, links: Sequence[Link], period_s: float, events: queue.SimpleQueue[tuple[int, Event]]
    ) -> None:
        self._links, self._period_s, self._events = links, period_s, events
        self._heard = [time.monotonic()] * len(links)
        self._noted = [-_NOTE_EVERY_S] * len(links)
        self._excused = [False] * len(links)
        self._end = threading.Event()
        self._sending = threading.RLock()
        self._paused = False

    def start(self) -> None:
        """Start the thread, if there is anything to watch."""
        if self._period_s > 0:
            self._heard = [time.monotonic()] * len(self._links)
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()

    @property
    def watches(self) -> bool:
        """Tell whether there is anything to watch."""
        return self._period_s > 0

    def pause(self) -> None:
        """Stop the pings: they would tell the nodes that this process goes on."""
        with self._sending:
            self._paused = True

    def forgive(self) -> None:
        """Count anew from now: this process stood still, so it has not heard the nodes."""
        self._paused = False
        self._heard = [time.monotonic()] * len(self._links)

    def heard(self, index: int) -> None:
        """Record that a node has sent something."""
        self._heard[index] = time.monotonic()

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
        now = time.monotonic()
        if now - self._noted[index] < _NOTE_EVERY_S:
            return False
        self._noted[index] = now
        return True

    def silence_s(self, index: int) -> float:
        """Return the seconds since the node was last heard."""
        return time.monotonic() - self._heard[index]

    def _run(self) -> None:
        reported: set[int] = set()
        pause_s = self._period_s / _PINGS_PER_PERIOD
        looked_at = time.monotonic()
        while not self._end.wait(pause_s):
            now = time.monotonic()
            if now - looked_at > 2 * pause_s:
                self.forgive()
            looked_at = now
            for index, link in enumerate(self._links):
                with self._sending:
                    if not self._paused:
                        link.transport.send({"cmd": "ping"})
                silence_s = self.silence_s(index)
                if silence_s > self._period_s and not self._excused[index] and index not in reported:
                    reported.add(index)
                    self._events.put((index, {"type": "silent", "silence_s": silence_s}))
