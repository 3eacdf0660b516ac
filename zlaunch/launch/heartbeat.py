"""Watch for nodes that no longer answer, and for ranks that no longer write anything.

`controller` decides what follows; `node/uplink.py` is what a node does when it no longer hears from here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zlaunch.launch.nodes import Link
from zlaunch.system.events import Event

_PINGS_PER_PERIOD = 4
_NOTE_EVERY_S = 60.0
_STACKS_S = 2.0
"""Seconds that the ranks get to write their stacks."""
_STACK_LINES = 40


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


class HangWatch:
    """Notices when no rank has written anything for a time, and collects the stacks asked for then.

    A timeout of 0 watches nothing.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last = time.monotonic()
        self._asked: float | None = None
        self._collected = False
        self._texts: dict[int, str] = {}

    def activity(self) -> None:
        """Record that some rank is alive and well."""
        if self._asked is None:
            self._last = time.monotonic()

    def output(self, rank: int, text: str) -> None:
        """Record a rank's output; after the stacks were asked for, it belongs to them."""
        self.activity()
        if self._asked is not None:
            self._texts[rank] = self._texts.get(rank, "") + text

    def next_s(self) -> float:
        """Return the seconds until something may be due."""
        if not self.timeout_s or self._collected:
            return 3600.0
        due = self._last + self.timeout_s if self._asked is None else self._asked + _STACKS_S
        return max(0.01, due - time.monotonic())

    def due(self) -> bool:
        """Tell whether it is time to ask for the stacks; return True once."""
        if self.timeout_s and self._asked is None and time.monotonic() - self._last >= self.timeout_s:
            self._asked = time.monotonic()
            return True
        return False

    def over(self) -> bool:
        """Tell whether the ranks have had their time to write the stacks; return True once."""
        if self._asked is not None and not self._collected and time.monotonic() - self._asked >= _STACKS_S:
            self._collected = True
            return True
        return False

    def stacks(self) -> str:
        """Return what the ranks wrote, rank by rank."""
        parts = []
        for rank in sorted(self._texts):
            lines = self._texts[rank].splitlines()[-_STACK_LINES:]
            parts.append(f"  rank {rank}:\n" + "\n".join(f"    | {line}" for line in lines))
        return "\n".join(parts) or "  (no rank answered)"
