"""Checks of what callers hand in. Each raises a ValueError that names the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Scalar = Tensor | float
"""A number, or a 0-dim tensor of it that is read on the device, so that nobody waits for its value."""

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)


def check_flat(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], like: Tensor | None = None) -> None:
    """``tensor`` is 1-dim, contiguous, of one of ``dtypes``; on the device and of the length of ``like``."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, stride {list(tensor.stride())}: expected one dimension "
            "without gaps"
        )
    if like is not None:
        check_device(name, tensor, like)
        if tensor.numel() != like.numel():
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {like.numel()}")


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device}")


def check_scalar(name: str, value: Scalar, like: Tensor) -> None:
    """``value`` is a number, or a 0-dim float32 tensor on the device of ``like``."""
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.dtype != torch.float32:
            raise ValueError(
                f"{name} is {value.dtype} of shape {list(value.shape)}, expected a number or a 0-dim "
                "torch.float32 tensor"
            )
        check_device(name, value, like)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """``low <= value < high``."""
    if not low <= value < high:
        raise ValueError(f"{name} is {value}, expected {low} <= {name} < {high}")
