"""Checks what ``engine.offload_states()`` asks for, and moves it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from ..config import Config
from ..errors import OffloadedError
from ..optim.sharded_optimizer import ShardedOptimizer
from ..zero.hooks import ShardedModel
from ..zero.ownership import STATES
from .states import States


class StateMover(States):
    """Moves the states of one engine, as its script asks, to host memory and back."""

    def __init__(self, sharded: ShardedModel, step: ShardedOptimizer | None, config: Config) -> None:
        super().__init__(sharded, sharded.reducer, step)
        self._zero = config.zero_optimization

    def move(self, include: Container[str] | None, device: Any, *, pin: bool, non_blocking: bool) -> None:
        """Move the states that ``include`` names, all for None; see ``Engine.offload_states``."""
        names = _names(include)
        where = getattr(device, "value", getattr(device, "type", device))  # an enum, a torch.device or a name
        if where != "cpu":
            raise ValueError(f'engine.offload_states(device={where!r}): states can be moved to "cpu" alone')
        for key in ("offload_optimizer", "offload_param"):
            section = getattr(self._zero, key)
            if section is not None and section.device != "none":
                raise OffloadedError(
                    f"engine.offload_states() cannot be used with zero_optimization.{key}: those states rest "
                    f"off the device (device {section.device}) as it is. Leave one of the two out"
                )
        self.offload(names, pin=pin, non_blocking=non_blocking)


def _names(include: Container[Any] | None) -> set[str]:
    """Return the states that ``include`` has. Raises ValueError for anything else in it."""
    if include is None:
        return set(STATES)
    known = ", ".join(STATES)
    if isinstance(include, str):
        raise ValueError(f"engine.offload_states(include=...) takes a list of names of states: {known}")
    if isinstance(include, Iterable):
        include = list(include)  # an iterator can be consumed only once
    elif not hasattr(include, "__contains__"):
        raise ValueError(
            f"engine.offload_states(include={include!r}): takes a list of names of states: {known}"
        )
    unknown = [each for each in include if each not in STATES] if isinstance(include, list) else []
    if unknown:
        raise ValueError(f"engine.offload_states(include=...): {unknown[0]!r} is not one of {known}")
    return {name for name in STATES if name in include}
