"""Reads what the launcher says about the other attempts of a run: their numbers of ranks, and batches."""

from __future__ import annotations

from typing import TypedDict

from .config import ConfigError
from .environment import read_environment
from .world_sizes import read_world_sizes

_engines = 0
"""Engines that this process has made: the launcher counts them in the same order."""


class Restarts(TypedDict):
    """Holds arguments of :func:`zlaunch.runtime.config.resolve`."""

    world_sizes: tuple[int, ...]
    first_batch: int | None


def note_engine() -> None:
    """Count an engine."""
    global _engines
    _engines += 1


def read_restarts() -> Restarts:
    """Return what the config of the next engine has to fit. Raises ConfigError for malformed variables."""
    environment = read_environment()
    try:
        sizes = read_world_sizes(environment.world_sizes)
    except ValueError as error:
        raise ConfigError([f"ZLAUNCH_WORLD_SIZES: {error}"]) from None
    try:
        batches = [int(word) for word in environment.first_batches.split()]
    except ValueError:
        text = f"ZLAUNCH_FIRST_BATCHES: {environment.first_batches!r} is not a list of global batches"
        raise ConfigError([text]) from None
    return {"world_sizes": sizes, "first_batch": batches[_engines] if _engines < len(batches) else None}
