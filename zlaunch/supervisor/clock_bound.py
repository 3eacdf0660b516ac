"""Bound the difference between the clock of an agent and the launcher's, by what is heard. Pure."""

from __future__ import annotations

import math

_WINDOW_S = 600.0
"""Seconds after which what was heard is forgotten, so that clocks that do not run alike spoil no bound."""


class ClockBound:
    """Knows by how much the launcher's clock is ahead of an agent's, at most (Note [Lease]).

    A beat that was on its way for long, or was read late, gives a bad bound. The best of the last two windows
    counts, and a window ends only when something is heard.
    """

    def __init__(self) -> None:
        self._began = -math.inf
        self._present = self._previous = math.inf

    def hear(self, beat: float, now: float) -> None:
        """Take a beat: when it was sent, by the agent's clock, and when it was heard, by the launcher's."""
        if now - self._began >= _WINDOW_S:
            self._began = now
            self._previous = self._present
            self._present = math.inf
        self._present = min(self._present, now - beat)

    @property
    def ahead_s(self) -> float | None:
        """Return the bound; None before anything was heard."""
        bound = min(self._present, self._previous)
        return None if math.isinf(bound) else bound
