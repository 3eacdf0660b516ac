"""Reach an agent. A transport only carries lines there and back; every decision is in the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from zlaunch.system.events import Event, Output


class Transport(Protocol):
    """Carries lines to and from a started agent on one node."""

    host: str
    local: bool
    """Tells whether the agent is on this machine, where the launcher can find its processes."""

    def send(self, message: Event) -> None:
        """Hand over a plan or a command; never raises and never blocks for long. Safe in a signal handler."""

    def events(self) -> Iterator[Event | Output]:
        """Yield the agent's events until it is gone. Blocks; one reader thread a node runs it."""

    def close(self, timeout_s: float) -> int | None:
        """Say goodbye, wait, and return the agent's exit status as subprocess has it; None if still there."""

    def kill(self) -> None:
        """Take the agent down at once."""

    def diagnostics(self) -> str:
        """Return what the agent or its transport wrote to stderr, for the report when it dies."""
