"""Prints what the runtime tells its user beside errors.

The config's ``log_level`` sets the level for the process; a quiet run (``ZLAUNCH_QUIET=1``, ``zlaunch -q``)
has warnings alone.
"""

from __future__ import annotations

import logging
from typing import TextIO

from .environment import read_environment

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_least = logging.INFO


def set_level(name: str | None) -> None:
    """Show messages from this level on: ``"debug"`` to ``"critical"``; None leaves it."""
    global _least
    if name is not None:
        _least = _LEVELS[name]


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line that is good to know."""
    if _least <= logging.INFO and not read_environment().quiet:
        print(f"zlaunch: {text}", file=file, flush=True)


def warn(text: str) -> None:
    """Print a line about something that may be wrong."""
    if _least <= logging.WARNING:
        print(f"zlaunch: warning: {text}", flush=True)
