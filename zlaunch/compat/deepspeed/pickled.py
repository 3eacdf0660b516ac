"""Small classes that DeepSpeed has under these names, also inside its checkpoint files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class ZeroStageEnum(IntEnum):
    """The stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Where things rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Parts of an engine's state."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@dataclass
class fragment_address:
    """A piece of a flat tensor."""

    numel: int
    start: int


class LossScalerBase:
    """A loss scale; the engine has its own, this is for files."""

    def __init__(self, cur_scale: float = 1.0) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """Return what losses are multiplied with."""
        return self.cur_scale


class LossScaler(LossScalerBase):
    """A fixed one."""


class DynamicLossScaler(LossScalerBase):
    """One that adapts."""

    def __init__(self, init_scale: float = 2.0**32, **settings: Any) -> None:
        super().__init__(init_scale)
        self.dynamic = True
        self.__dict__.update(settings)
