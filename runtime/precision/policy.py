"""Chooses from the config how a model computes: in fp16, bf16 or fp32, and under torch.autocast or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .loss_scaler import LossScaler

if TYPE_CHECKING:
    from ..config import Config

_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the torch dtype behind a name of the config; None stays None."""
    return None if name is None else _DTYPES[name]


@dataclass(frozen=True, slots=True)
class Precision:
    """Says how a model computes."""

    dtype: torch.dtype | None
    """Names the dtype that floating-point parameters are converted to; None leaves them as they are."""
    scaler: LossScaler
    cast_inputs: bool
    check_finite: bool
    """Tells whether to skip a step whose gradients are not finite."""
    narrow_masters: bool = False
    """Tells that master values have ``dtype``, and are rounded at random."""
    autocast: torch.dtype | None = None
    """Names the dtype of torch.autocast in forward passes of the engine; None leaves the script's own."""

    def around_forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass on a device."""
        if self.autocast is None:
            return nullcontext()
        # The cache would hold copies of weights that stage 3 frees, and one made without gradients, by a
        # reentrant checkpoint, would be used where gradients are needed.
        return torch.autocast(device.type, self.autocast, cache_enabled=False)


def choose_precision(config: Config) -> Precision:
    """Return the precision that a validated config asks for."""
    if config.fp16.enabled:
        fp16 = config.fp16
        dynamic = fp16.loss_scale == 0
        scaler = LossScaler(
            scale=2.0**fp16.initial_scale_power if dynamic else float(fp16.loss_scale),
            dynamic=dynamic,
            window=int(fp16.loss_scale_window),
            min_scale=float(fp16.min_loss_scale),
            hysteresis=int(fp16.hysteresis),
            consecutive_hysteresis=fp16.consecutive_hysteresis,
        )
        return Precision(torch.float16, scaler, fp16.auto_cast, True)
    if config.bf16.enabled:
        narrow = config.bf16.master_weights == "stochastic"
        return Precision(torch.bfloat16, LossScaler(), False, config.bf16.check_grad_overflow, narrow)
    name, scale, floor = config.autocast
    # a dynamic scale has the numbers of torch.amp.GradScaler
    scaler = LossScaler(scale) if scale else LossScaler(max(2.0**16, floor), True, 2000, floor, 1)
    check = scaler.used or name == "fp16"
    return Precision(None, scaler, False, check, autocast=dtype_named(name))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in tuples, lists and dicts; return other values unchanged."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [cast_floats(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [cast_floats(item, dtype) for item in value]
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    return value
