"""Defines what a parameter, and the code that watches it, needs to know of its unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import Protocol

import torch

from ..errors import OffloadedError

OPTIMIZER, MASTERS, VALUES, GRADIENTS, BUFFERS = STATES = (
    "optim_states",
    "hp_params",
    "lp_params",
    "lp_grads",
    "contiguous_grad_buffer",
)
"""Lists DeepSpeed's names for what can be moved to host memory for a while: the optimizer's state, the fp32
masters, what the model computes with, the reduced gradients, and the gradients' send buffers.
"""


class UnitState(Enum):
    """Says where the values of a unit's parameters are."""

    UNSHARDED = auto()
    """Means that every rank has all values; the parameters are views of the flat buffer."""
    GATHERING = auto()
    """Means that a collective is filling the flat buffer."""
    SHARDED = auto()
    """Means that only each rank's slice exists; the parameters are placeholders."""
    AWAY = auto()
    """Means that an unsharded unit's values are in host memory; the parameters are placeholders."""


class Owner(Protocol):
    """Manages a parameter: a unit, as the parameter sees it."""

    trainable: bool
    provisional: bool
    names: list[str]
    shapes: list[torch.Size]
    index_of: dict[int, int]
    on_demand: Callable[[Owner], bool] | None
    """Called when a sharded parameter is used; returns whether its values have been gathered."""

    def wait_unsharded(self) -> None:
        """Wait until the parameters have their values."""

    def expose(self) -> None:
        """Note that ``data`` of a parameter has been handed out."""

    def hides_gradient(self, parameter: torch.Tensor) -> bool:
        """Tell whether the engine has taken a gradient of this parameter since the last step."""

    def forget_gradient(self, parameter: torch.Tensor) -> None:
        """Drop the gradient accumulated for this parameter since the last step."""


class GradientBook(Protocol):
    """Collects gradients and knows which parameters have had one since the last step."""

    def has(self, unit: object, index: int) -> bool:
        """Tell whether parameter ``index`` has had a gradient."""

    def forget(self, unit: object, index: int) -> None:
        """Drop the gradient of parameter ``index``."""

    def clear(self) -> None:
        """Drop all gradients."""


def check_here(away: Collection[str], needed: Sequence[str], what: str) -> None:
    """Raise OffloadedError if a state that ``what`` needs is off the device."""
    missing = [name for name in needed if name in away]
    if missing:
        raise OffloadedError(
            f"{what} needs {', '.join(missing)}, which engine.offload_states() moved to host memory: "
            "call engine.reload_states() on all ranks first"
        )
