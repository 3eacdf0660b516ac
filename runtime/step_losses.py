"""Adds up a step's losses over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .device import keep_for_stream


class StepLosses:
    """Collects the losses of this rank's micro-batches; the step sums :meth:`numbers` over the ranks."""

    COUNT = 2
    """The length of :meth:`numbers`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum: Tensor | None = None
        self._weight: float | Tensor = 0.0
        self._has_some = False
        self.mean: float | Tensor | None = None
        """Is the mean of the last step's losses, a number or 0-dim on the device; None where this rank had
        none.
        """

    def note(self, loss: Tensor, *, is_share: bool = False, tokens: int | Tensor | None = None) -> None:
        """Add the loss of one micro-batch, if it is a single number. ``is_share``: the caller has divided it,
        so that the losses of a step add up. ``tokens``: the number of tokens that it is a mean of, which is
        its weight; None where all losses have the same.
        """
        if loss.numel() != 1:
            return
        value = loss.detach().reshape(()).double()
        if tokens is not None:
            value = value * tokens
        self._sum = value if self._sum is None else self._sum + value
        self._has_some = True
        self._weight = 1.0 if is_share else self._weight + (1.0 if tokens is None else tokens)

    def clear(self) -> None:
        """Forget the losses since the last step."""
        self._sum = None
        self._weight = 0.0
        self._has_some = False

    def numbers(self) -> Tensor:
        """Return the sum of the losses and that of their weights, (2,) in float64 on the device."""
        own = self._sum
        own = (
            torch.zeros((), device=self._device, dtype=torch.float64) if own is None else keep_for_stream(own)
        )
        own = own.to(self._device)
        weight = self._weight
        if isinstance(weight, Tensor):
            keep_for_stream(weight)
        return torch.stack([own, torch.zeros_like(own) + weight])

    def take(self, sums: Sequence[float] | Tensor) -> None:
        """Take the sums over the ranks at the end of a step, where they are, and begin the next one. Without
        any weight the mean is NaN.
        """
        self.mean = None
        if self._has_some:
            self.mean = sums[0] / sums[1] if isinstance(sums, Tensor) or sums[1] else math.nan
        self.clear()

    @staticmethod
    def total_weight(sums: Sequence[float] | Tensor) -> float | Tensor:
        """Return the sum of the losses' weights from the sums over the ranks."""
        return sums[1]
