"""Checks that ranks which share a batch were given the same one, or made the same of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import RankMismatchError
from .zero.output_tensors import tensors_in

_FIRST, _EVERY = 10, 50
_ROWS, _CHUNK = 8, 1 << 20
_SAME = 1e-12
COMPUTED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Limits by dtype how far apart, as a part of the norm, values may be that ranks have computed alike: sums
without a fixed order round differently. Other weights make far larger differences."""
COMPUTED_HALF = 3e-2


class SameBatch:
    """Compares the batches of the ranks of an axis: in the first passes, then in some. Collective.

    Compared are projections of each tensor on two fixed vectors, its norm and its shape.
    """

    def __init__(
        self,
        device: torch.device,
        largest: Callable[[Tensor], Tensor],
        complaint: str,
        *,
        first: int = _FIRST,
        computed: bool = False,
    ) -> None:
        """``largest`` replaces each element of a tensor by the largest of the axis; ``complaint`` is what the
        error says. Compared are the ``first`` passes; values that were ``computed`` may be rounded.
        """
        self._device, self._largest, self._complaint = device, largest, complaint
        self._first, self._computed = first, computed
        self._passes = 0

    def check(self, inputs: Any, *, always: bool = False) -> None:
        """Raise RankMismatchError if the ranks have different tensors in ``inputs``; with ``always`` they are
        compared in any case.
        """
        if always or self._passes < self._first or self._passes % _EVERY == 0:
            self._compare(tensors_in(inputs))
        self._passes += 1

    def _compare(self, tensors: Iterable[Tensor]) -> None:
        sums = torch.zeros(_ROWS, 4, dtype=torch.float64, device=self._device)
        for index, tensor in enumerate(tensors):
            sums[min(index, _ROWS - 1)] += self._summary(tensor, index)
        both = self._largest(torch.cat([sums, -sums]))
        spread, limits = both[:_ROWS] + both[_ROWS:], both[:_ROWS, 2].sqrt()
        differs = (spread[:, :2] > limits.unsqueeze(1)).any() | (spread[:, 3] > 0).any()
        if bool(differs):  # CPUs of several kinds round the sums of floats differently
            raise RankMismatchError(self._complaint)

    def _summary(self, tensor: Tensor, index: int) -> Tensor:
        """Return two projections, the square of how far they may be apart, and a number of the shape."""
        is_computed = self._computed and tensor.is_floating_point()
        rounding = COMPUTED.get(tensor.dtype, COMPUTED_HALF) if is_computed else _SAME
        flat = tensor.detach().reshape(-1)
        flat = flat.real if flat.is_complex() else flat
        shape = float(sum((place + 2) * size for place, size in enumerate(tensor.shape)) + index)
        found = torch.zeros(4, dtype=torch.float64, device=self._device)
        found[3].fill_(shape)
        for begin in range(0, flat.numel(), _CHUNK):  # logits are large
            wide = flat[begin : begin + _CHUNK].to(self._device, torch.float64).nan_to_num(1.0, 2.0, 3.0)
            places = torch.arange(begin, begin + wide.numel(), device=wide.device)
            mixed = (places * 2654435761 + 40503) >> 7  # Knuth's multiplicative hashing
            for column, bits in enumerate((mixed & 1023, (mixed >> 10) & 1023)):
                found[column] += (wide * (bits.double() / 512 - 1 + 1 / 4096)).sum()
            found[2] += wide.square().sum() * rounding**2
        return found
