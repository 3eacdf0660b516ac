"""Arguments of the optimizer steps, and checks of what callers hand in; a ValueError names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Scalar = Tensor | float
"""A number, or a 0-dim tensor of it that is read on the device, so that nobody waits for its value."""

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
A = TypeVar("A", bound="StepArgs")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArgs:
    """Coefficients of an optimizer step, made once for all the pieces of a param group."""

    lr: Scalar
    weight_decay: float
    multiplier: Scalar
    """The factor of the gradient: it unscales, averages and clips."""
    found_inf: Scalar | None = None
    """Nothing is written where it is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaArgs(StepArgs):
    """Coefficients of a step with moving averages."""

    beta1: float
    beta2: float

    def __post_init__(self) -> None:
        check_range("beta1", self.beta1, 0.0, 1.0)
        check_range("beta2", self.beta2, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamArgs(BetaArgs):
    """Coefficients of Adam, or of AdamW if ``decoupled``."""

    eps: float
    decoupled: bool
    corrected: bool = True
    """Whether the moments' bias is corrected, by ``1 - beta**step``."""

    def log_betas(self) -> tuple[float, float]:
        """Return both logarithms: ``1 - beta**step`` is ``-expm1(step * log(beta))``, exact in fp32 too.
        Without correction both are minus infinity, by which that is 1 at every step.
        """
        betas = (self.beta1, self.beta2) if self.corrected else (0.0, 0.0)
        first, second = (math.log(b) if b > 0 else -math.inf for b in betas)
        return first, second

    def corrections(self, step: float) -> tuple[float, float]:
        """Return what the two moments are divided by at a step."""
        return (1 - self.beta1**step, 1 - self.beta2**step) if self.corrected else (1.0, 1.0)

    def coefficients(self) -> tuple[float, ...]:
        """Return the CUDA kernels' last arguments."""
        rates = (*self.log_betas(), 1 - self.beta1, 1 - self.beta2)
        return (*rates, float(self.eps), float(self.weight_decay), int(self.decoupled))


@dataclass(frozen=True, slots=True, kw_only=True)
class LionArgs(BetaArgs):
    """Coefficients of Lion."""

    def coefficients(self) -> tuple[float, ...]:
        """Return the CUDA kernels' last arguments."""
        return 1.0 - self.beta1, 1.0 - self.beta2, float(self.weight_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdArgs(StepArgs):
    """Coefficients of SGD."""

    momentum: float
    dampening: float
    nesterov: bool

    def __post_init__(self) -> None:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov needs momentum > 0 and dampening = 0")

    def coefficients(self) -> tuple[float, ...]:
        """Return the CUDA kernels' last arguments."""
        return float(self.momentum), 1.0 - self.dampening, float(self.weight_decay), int(self.nesterov)


def on_host(args: A) -> A | None:
    """Return the arguments with all their scalars as plain numbers; None if the step is to be skipped."""
    if args.found_inf is not None and float(args.found_inf) != 0:
        return None
    if isinstance(args.lr, float) and isinstance(args.multiplier, float) and args.found_inf is None:
        return args
    return replace(args, lr=float(args.lr), multiplier=float(args.multiplier), found_inf=None)


def check_flat(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], like: Tensor | None = None) -> None:
    """Check that ``tensor`` is flat, without gaps, of one of ``dtypes``, on the device and of the length
    of ``like``.
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, stride {list(tensor.stride())}: expected a contiguous "
            "1-D tensor"
        )
    if like is not None:
        check_device(name, tensor, like)
        if tensor.numel() != like.numel():
            raise ValueError(f"{name} has {tensor.numel()} elements, expected {like.numel()}")


def check_rows(name: str, rows: Tensor) -> None:
    """Check that ``rows`` is 2-D, without gaps, with one row or more."""
    if rows.dim() != 2 or not rows.is_contiguous() or not rows.shape[0]:
        raise ValueError(
            f"{name} has shape {list(rows.shape)}, stride {list(rows.stride())}: "
            "expected a contiguous 2-D tensor with at least one row"
        )


def check_packed(
    name: str, packed: Tensor, values: Tensor, values_name: str, bytes_of: Callable[[int], int]
) -> None:
    """Check that ``packed``, flat or of rows, is uint8 on the device of ``values``, and holds them.

    ``bytes_of``: returns the bytes of a row for a number of elements.
    """
    row = packed
    rows = 1
    if packed.dim() == 2:
        check_rows(name, packed)
        rows = len(packed)
        row = packed[0]
    check_flat(name, row, (torch.uint8,))
    check_device(name, packed, values)
    if values.numel() % rows:
        raise ValueError(f"{values_name} has {values.numel()} elements: expected a multiple of {rows} rows")
    wanted = bytes_of(values.numel() // rows)
    if row.numel() != wanted:
        each = f" in each of {rows} rows" if rows > 1 else ""
        raise ValueError(f"{name} has {row.numel()} bytes, expected {wanted}{each} for {values.numel()}")


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device}")


def check_scalar(name: str, value: Scalar, like: Tensor) -> None:
    """Check that ``value`` is a number, or a 0-dim float32 tensor on the device of ``like``."""
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.dtype != torch.float32:
            raise ValueError(
                f"{name} is {value.dtype} of shape {list(value.shape)}, expected a number or a 0-dim "
                "torch.float32 tensor"
            )
        check_device(name, value, like)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Check that ``low <= value < high``."""
    if not low <= value < high:
        raise ValueError(f"{name} is {value}, expected {low} <= {name} < {high}")
