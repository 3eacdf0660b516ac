"""Checks that ranks which share a batch were given the same one, or made the same of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import RankMismatchError
from .zero.output_tensors import tensors_in

_FIRST, _EVERY = 10, 50
_PERIOD, _ROUNDING, _CHUNK = 97, 1e-12, 1 << 20


class SameBatch:
    """Compares the batches of the ranks of an axis: in the first passes, then in some. Collective."""

    def __init__(
        self,
        device: torch.device,
        largest: Callable[[Tensor], Tensor],
        complaint: str,
        *,
        first: int = _FIRST,
        rounding: float = _ROUNDING,
    ) -> None:
        """``largest`` replaces each element of a tensor by the largest of the axis; ``complaint`` is what the
        error says. Compared are the ``first`` passes, and sums that differ by more than ``rounding`` of those
        of the magnitudes differ.
        """
        self._device, self._largest, self._complaint = device, largest, complaint
        self._first, self._rounding = first, rounding
        self._passes = 0

    def check(self, inputs: Any, *, always: bool = False) -> None:
        """Raise RankMismatchError if the ranks have different tensors in ``inputs``; with ``always`` they are
        compared in any case.
        """
        if always or self._passes < self._first or self._passes % _EVERY == 0:
            self._compare(tensors_in(inputs))
        self._passes += 1

    def _compare(self, tensors: Iterable[Tensor]) -> None:
        sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        for index, tensor in enumerate(tensors):
            flat = tensor.detach().reshape(-1)
            flat = flat.real if flat.is_complex() else flat
            for begin in range(0, flat.numel(), _CHUNK):  # logits are large
                wide = flat[begin : begin + _CHUNK].to(self._device, torch.float64).nan_to_num(1.0, 2.0, 3.0)
                places = torch.arange(begin, begin + wide.numel(), device=wide.device)
                weights = places % _PERIOD + index + 1.0
                size = wide.abs()
                found = wide.sum(), (wide * weights).sum(), wide.square().sum(), weights.sum()
                sums += torch.stack([*found, size.sum(), (size * weights).sum()])
        both = self._largest(torch.cat([sums, -sums]))
        spread = both[:4] + both[6:10]  # CPUs of several kinds round the sums of floats differently
        if bool((spread > self._rounding * both[[4, 5, 2, 3]]).any()):
            raise RankMismatchError(self._complaint)
