"""Checks the numbers of the experts that tokens are routed to, without bringing anything to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ParameterError


def bounds(index: Tensor) -> Tensor:
    """Return the smallest and the largest number in an index, on its device; 0 counts as one of them."""
    numbers = torch.cat([index.flatten(), index.new_zeros(1)])
    return torch.stack(torch.aminmax(numbers))


def check_bounds(name: str, lowest: int, highest: int, total: int) -> None:
    """Raise ParameterError if a number is not one of ``total`` experts and not -1, which adds nothing."""
    if lowest < -1 or highest >= total:
        wrong = highest if highest >= total else lowest
        raise ParameterError(
            f"{name}: a token is routed to expert {wrong}: expected 0 to {total - 1}, or -1 for none"
        )


def check_kind(name: str, index: Tensor) -> None:
    """Raise ParameterError for an index that does not hold whole numbers."""
    if index.dtype not in (torch.int64, torch.int32):
        raise ParameterError(f"{name}: expected an index of int64, got {index.dtype}")
