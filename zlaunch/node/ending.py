"""Decide when an ending run's workers and their leftovers are looked for, asked to end, and killed. Pure."""

from __future__ import annotations

from enum import Enum, auto

_SCAN_INTERVAL_S = 0.1
_LEFTOVER_S = 0.5
"""Seconds in which helpers of a finished worker (trackers, uploaders) may end by themselves."""


class Due(Enum):
    """Says what the agent has to do now."""

    NOTHING = auto()
    SCAN = auto()
    """Look for what the workers have left."""
    KILL = auto()
    """Kill all that is there."""


class Ending:
    """Keeps the times of a run's end, in monotonic seconds."""

    def __init__(self) -> None:
        self.stopping = False
        """Tells whether the agent ends the workers; otherwise they end by themselves."""
        self._kill_at: float | None = None
        self._scan_at = 0.0

    def stop(self, now: float, grace_s: float) -> None:
        """Give the workers `grace_s` seconds to end."""
        self.stopping = True
        self._kill_at = now + grace_s

    def kill(self, now: float) -> None:
        """Let the next `due` be KILL."""
        self._kill_at = now

    def due(self, now: float, *, all_exited: bool) -> Due:
        """Return what is due. The end also begins when all workers have exited."""
        if self._kill_at is None and all_exited:
            self._kill_at = now + _LEFTOVER_S
        if self._kill_at is None:
            return Due.NOTHING
        if now >= self._kill_at:
            return Due.KILL
        if all_exited and now >= self._scan_at:
            self._scan_at = now + _SCAN_INTERVAL_S
            return Due.SCAN
        return Due.NOTHING

    def wait_s(self, now: float, longest_s: float, *, all_exited: bool) -> float:
        """Return the seconds in which nothing can become due."""
        moments = [now + longest_s]
        if self._kill_at is not None:
            moments += [self._kill_at, *([self._scan_at] if all_exited else [])]
        return max(0.0, min(moments) - now)
