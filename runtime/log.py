"""What the runtime tells the user beside warnings and errors."""

from __future__ import annotations

from typing import TextIO

from .environment import read_environment


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line of information, unless the run is to be quiet (``ZLAUNCH_QUIET=1``, ``zlaunch -q``)."""
    if not read_environment().quiet:
        print(f"zlaunch: {text}", file=file, flush=True)
