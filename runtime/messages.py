"""What the runtime tells its user, from a level on that the config's ``log_level`` sets for the process."""

from __future__ import annotations

import logging

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_least = logging.INFO


def set_level(name: str | None) -> None:
    """Show messages from this level on: ``"debug"`` to ``"critical"``; None leaves it."""
    global _least
    if name is not None:
        _least = _LEVELS[name]


def say(text: str) -> None:
    """Print a line that is good to know."""
    if _least <= logging.INFO:
        print(f"zlaunch: {text}", flush=True)


def warn(text: str) -> None:
    """Print a line about something that may be wrong."""
    if _least <= logging.WARNING:
        print(f"zlaunch: warning: {text}", flush=True)
