"""Computes Muon's orthogonal matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Sets the quintic iteration, with the largest slope at zero (Jordan et al., 2024)."""

PRODUCTS = torch.bfloat16
"""Sets the dtype that matrices are multiplied in."""


def orthogonalize(
    matrix: Tensor, coefficients: Sequence[float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Return, in bf16, a matrix with the singular vectors of ``matrix`` (two dimensions, any floating dtype)
    and singular values near 1, by a quintic Newton-Schulz iteration.

    The iteration is that of "Muon: An optimizer for hidden layers in neural networks" (Jordan et al., 2024);
    in bf16 it gives what torch.optim.Muon computes.
    """
    a, b, c = coefficients
    x = matrix.to(torch.bfloat16).to(PRODUCTS)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(torch.bfloat16)


def adjusted_rate(group: Mapping[str, Any], rows: int, columns: int) -> float:
    """Return the learning rate of a matrix: "original" (the default) multiplies by sqrt(max(1, rows /
    columns)), "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), as torch.optim.Muon has it.
    """
    lr = float(group["lr"])
    if group.get("adjust_lr_fn") == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1.0, rows / columns))
