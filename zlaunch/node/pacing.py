"""Let output gather while a worker writes many small pieces.

A piece costs the agent and the launcher the same time whatever its size. A script that flushes each line
would keep both busy.
"""

from __future__ import annotations

import time

_REST_S = 0.002
"""Short enough that nobody sees it, long enough for hundreds of lines."""
_SMALL_BYTES = 1 << 15
"""Output of one round that is worth its cost."""
_SOON_S = 0.001
_ROUNDS = 8
"""Rounds in close succession that may be small. A start and an end have fewer: they must not wait."""


class Pacing:
    """Counts the rounds of an agent's loop that only take a little output, and rests between them."""

    def __init__(self) -> None:
        self._bytes = self._rounds = 0
        self._ended_at = 0.0

    def took(self, count: int) -> None:
        """Record output of this round."""
        self._bytes += count

    def end_round(self) -> None:
        """Rest if this round and those before it took little each."""
        # After a pause the count starts again: a line that somebody waits for is passed on at once.
        is_soon = time.monotonic() - self._ended_at < _SOON_S
        self._rounds = self._rounds + 1 if self._bytes and is_soon else 0
        if self._rounds > _ROUNDS and self._bytes < _SMALL_BYTES:
            time.sleep(_REST_S)
        self._bytes = 0
        self._ended_at = time.monotonic()
