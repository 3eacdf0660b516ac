"""Checks that ranks which share a batch were given the same one, or made the same of it.

Note [Same batches]
    Each pass takes a fingerprint of its inputs, a sum over all their bits, where they are. In the first
    passes ranks compare it before they compute, so that a wrong script fails early. Every pass adds it to a
    number of all passes so far, which travels in the all-reduce that an optimizer step makes anyway. So no
    later pass waits, and no step is made with a batch that differed. A sum over all ranks of the world tells
    whether the ranks of each group have equal numbers: each multiplies its own by a coefficient, and the
    coefficients of a group add up to zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .comm.collectives import Comm
from .errors import RankMismatchError
from .small_copies import to_device
from .zero.output_tensors import tensors_in

_FIRST = 10
_ROWS, _CHUNK = 8, 1 << 20
_SAME = 1e-12
"""CPUs of several kinds round the sums of equal integers differently."""
COMPUTED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Limits by dtype how far apart, as a part of the norm, values may be that ranks have computed alike: sums
without a fixed order round differently. Other weights make far larger differences."""
COMPUTED_HALF = 3e-2

_LANES = {1: torch.uint8, 2: torch.int16}
_FACTOR = 6364136223846793005
_SEED = 20_240_229
_WORDS, _WORD_BITS = 3, 20
"""Divide a number into parts whose products with coefficients of as many bits float64 sums exactly."""


@cache
def _weights(length: int, device: torch.device) -> Tensor:
    """Return random factors for a chunk of lanes, equal on all ranks."""
    generator = torch.Generator().manual_seed(_SEED)
    limits = torch.iinfo(torch.int64)
    return to_device(torch.randint(limits.min, limits.max, (length,), generator=generator), device)


def _sum_bits(tensor: Tensor) -> Tensor:
    """Return a sum of all bits with weights by position, 0-dim int64 with overflow, where the tensor is."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    # 32 bits at most, so that a change of the highest one changes many bits of the product
    lanes = flat.view(_LANES.get(flat.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    length = min(_CHUNK, 1 << max(lanes.numel() - 1, 1).bit_length())
    weights = _weights(length, lanes.device)
    for chunk in torch.split(lanes, _CHUNK):
        total = total * _FACTOR + (chunk * weights[: chunk.numel()]).sum()
    return total


def fingerprint(inputs: Any, device: torch.device) -> Tensor:
    """Return a number of the bits, shapes and dtypes of tensors in ``inputs``: 0-dim int64 on a device."""
    tensors = list(tensors_in(inputs))
    shapes = [(tuple(each.shape), str(each.dtype)) for each in tensors]
    total = torch.full((), zlib.crc32(repr(shapes).encode()), dtype=torch.int64, device=device)
    for tensor in tensors:
        found = _sum_bits(tensor)
        total = total * _FACTOR + (found if found.device.type == device.type else to_device(found, device))
    return total


def both_ways(number: Tensor) -> Tensor:
    """Return a fingerprint and its complement, for :func:`differ` after the larger ones were taken."""
    return torch.stack([number, ~number])


def differ(largest: Tensor) -> Tensor:
    """Tell whether fingerprints differ, 0-dim bool, by the largest :func:`both_ways` of the ranks."""
    return largest[0] != ~largest[1]


class SameBatch:
    """Compares the batches of the ranks of an axis: see Note [Same batches]."""

    mark_count = _WORDS
    """Counts the numbers of :meth:`marks`."""

    def __init__(
        self,
        comm: Comm,
        ranks: Sequence[int],
        largest: Callable[[Tensor], Tensor],
        complaint: str,
        *,
        every_pass: bool,
    ) -> None:
        """``ranks`` share a batch; ``largest`` replaces each element of a tensor by the largest of them;
        ``complaint`` is what the error says. ``every_pass``: all passes are compared at once, where
        parameters change before the step.
        """
        self.ranks, self.complaint = tuple(ranks), complaint
        self._device = comm.device
        self._largest = largest
        self._every_pass = every_pass
        self._passes = 0
        self._all = torch.zeros((), dtype=torch.int64, device=self._device)
        """Is a number of all passes so far."""
        generator = torch.Generator().manual_seed(_SEED)
        others = torch.randint(1, 1 << _WORD_BITS, (len(ranks) - 1, _WORDS), generator=generator)
        own = torch.cat([-others.sum(0, keepdim=True), others])[self.ranks.index(comm.rank)]
        self._coefficients = own.to(self._device, torch.float64)
        comm.batches.append(self)

    def __deepcopy__(self, memo: Any) -> SameBatch:
        return self  # the ranks call a copy of a model with one batch, too

    def check(self, inputs: Any, *, always: bool = False) -> None:
        """Take the tensors in ``inputs``. Raises RankMismatchError in the first passes, and with ``always``,
        if the ranks have different ones; later the step does.
        """
        found = fingerprint(inputs, self._device)
        if always or self._every_pass or self._passes < _FIRST:
            self._compare(found)
        if not always:
            self._all = self._all * _FACTOR + found
            self._passes += 1

    def _compare(self, found: Tensor) -> None:
        if bool(differ(self._largest(both_ways(found)))):
            raise RankMismatchError(self.complaint)

    def marks(self) -> Tensor:
        """Return numbers whose sums over all ranks are zero if the passes of each group were equal."""
        mask = (1 << _WORD_BITS) - 1
        words = torch.stack([self._all >> (at * _WORD_BITS) & mask for at in range(_WORDS)])
        return words.double() * self._coefficients

    def seen(self) -> int:
        """Return a number of all passes so far."""
        return int(self._all)

    def forget(self) -> None:
        """Begin again, after an error on all ranks."""
        self._all = torch.zeros_like(self._all)


class SameValues:
    """Compares what the ranks of an axis have computed in the first passes, which may be rounded. Collective.

    Compared are projections of each tensor on two fixed vectors, its norm and its shape.
    """

    def __init__(
        self, device: torch.device, largest: Callable[[Tensor], Tensor], complaint: str, *, first: int
    ) -> None:
        """``largest`` replaces each element of a tensor by the largest of the axis; ``complaint`` is what the
        error says.
        """
        self._device = device
        self._largest = largest
        self._complaint = complaint
        self._first, self._passes = first, 0

    def check(self, values: Any) -> None:
        """Raise RankMismatchError if the ranks have different tensors in ``values``."""
        if self._passes < self._first:
            self._compare(tensors_in(values))
        self._passes += 1

    def _compare(self, tensors: Iterable[Tensor]) -> None:
        sums = torch.zeros(_ROWS, 4, dtype=torch.float64, device=self._device)
        for index, tensor in enumerate(tensors):
            sums[min(index, _ROWS - 1)] += self._summary(tensor, index)
        both = self._largest(torch.cat([sums, -sums]))
        spread, limits = both[:_ROWS] + both[_ROWS:], both[:_ROWS, 2].sqrt()
        differs = (spread[:, :2] > limits.unsqueeze(1)).any() | (spread[:, 3] > 0).any()
        if bool(differs):
            raise RankMismatchError(self._complaint)

    def _summary(self, tensor: Tensor, index: int) -> Tensor:
        """Return two projections, the square of how far they may be apart, and a number of the shape."""
        rounding = COMPUTED.get(tensor.dtype, COMPUTED_HALF) if tensor.is_floating_point() else _SAME
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
