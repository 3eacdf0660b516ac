"""Checks that ranks which share a batch were given the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import RankMismatchError
from .zero.output_tensors import tensors_in

_FIRST, _EVERY = 10, 50
_PERIOD, _ROUNDING = 97, 1e-12


class SameBatch:
    """Compares the batches of the ranks of an axis: in the first passes, then in some. Collective."""

    def __init__(self, device: torch.device, largest: Callable[[Tensor], Tensor], complaint: str) -> None:
        """``largest`` replaces each element of a tensor by the largest of the axis; ``complaint`` is what the
        error says.
        """
        self._device, self._largest, self._complaint = device, largest, complaint
        self._passes = 0

    def check(self, inputs: Any, *, always: bool = False) -> None:
        """Raise RankMismatchError if the ranks were given different tensors in ``inputs``; with ``always``
        they are compared in any case.
        """
        if always or self._passes < _FIRST or self._passes % _EVERY == 0:
            self._compare(inputs)
        self._passes += 1

    def _compare(self, inputs: Any) -> None:
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        for index, tensor in enumerate(tensors_in(inputs)):
            flat = tensor.detach().reshape(-1)
            flat = flat.real if flat.is_complex() else flat
            wide = flat.to(self._device, torch.float64).nan_to_num(1.0, 2.0, 3.0)
            weights = torch.arange(wide.numel(), device=wide.device) % _PERIOD + index + 1.0
            sums += torch.stack([wide.sum(), (wide * weights).sum(), wide.square().sum(), weights.sum()])
        both = self._largest(torch.cat([sums, -sums]))
        spread = both[:4] + both[4:]  # CPUs of several kinds round the sums of floats differently
        if bool((spread > _ROUNDING * both[:4].abs()).any()):
            raise RankMismatchError(self._complaint)
