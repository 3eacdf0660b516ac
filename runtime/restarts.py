"""Reads what the launcher says about the other attempts of a run: their numbers of ranks, and batches."""

from __future__ import annotations

from typing import TypedDict

from .config import ConfigError
from .environment import read_environment
from .world_sizes import FirstBatch, find_first_batch, read_first_batches, read_world_sizes

_micro_batches: list[int | None] = []
"""The micro-batches of the engines that this process has made, in their order."""


class Restarts(TypedDict):
    """Holds arguments of :func:`zlaunch.runtime.config.resolve`."""

    world_sizes: tuple[int, ...]
    first_batches: tuple[FirstBatch, ...]


def note_engine(micro: int | None) -> None:
    """Note an engine and its micro-batch."""
    _micro_batches.append(micro)


def read_restarts() -> Restarts:
    """Return what the config of the next engine has to fit. Raises ConfigError for malformed variables."""
    environment = read_environment()
    try:
        sizes = read_world_sizes(environment.world_sizes)
    except ValueError as error:
        raise ConfigError([f"ZLAUNCH_WORLD_SIZES: {error}"]) from None
    try:
        left = list(read_first_batches(environment.first_batches))
    except ValueError as error:
        raise ConfigError([f"ZLAUNCH_FIRST_BATCHES: {error}"]) from None
    for micro in _micro_batches:
        repeated = find_first_batch(left, micro)
        if repeated is not None:
            left.remove(repeated)
    return {"world_sizes": sizes, "first_batches": tuple(left)}
