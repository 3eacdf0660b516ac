"""Chooses a compute dtype and a loss scaler from the config's fp16/bf16 sections."""

from __future__ import annotations

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
    return Precision(None, LossScaler(), False, False)


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
