"""Prints what the runtime has to say to its user; no other module of the runtime does, except commands.

The config's ``log_level`` sets the level for the process; a quiet run (``ZLAUNCH_QUIET=1``, ``zlaunch -q``)
prints only warnings, failures, and what its script has asked for. A verbose run (``ZLAUNCH_VERBOSE=1``,
``zlaunch -v``) prints the details of its start as well.
"""

from __future__ import annotations

import logging
from typing import TextIO

from .environment import read_environment

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_least = logging.INFO


def set_level(name: str | None) -> None:
    """Set the level from which messages are shown: ``"debug"`` to ``"critical"``; None changes nothing."""
    global _least
    if name is not None:
        _least = _LEVELS[name]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line of information."""
    if _least <= logging.INFO and not read_environment().quiet:
        print(f"zlaunch: {text}", file=file, flush=True)


def detail(text: str, file: TextIO | None = None) -> None:
    """Print a line of information that only ``zlaunch --verbose`` or the level ``"debug"`` asks for."""
    if _least <= logging.DEBUG or read_environment().verbose:
        say(text, file)


def warn(text: str) -> None:
    """Print a line about something that may be wrong."""
    if _least <= logging.WARNING:
        print(f"zlaunch: warning: {text}", flush=True)


def fail(text: str, file: TextIO | None = None) -> None:
    """Print a line about a failure, at every level."""
    print(f"zlaunch: {text}", file=file, flush=True)


def show(text: str, file: TextIO | None = None) -> None:
    """Print a line that the script or its config has asked for: as it is, at every level."""
    print(text, file=file, flush=True)
