"""The order in which all ranks together read a data set with indices, and a rank's share of it.

Positions count what all ranks have read since the epoch began, so they hold for any number of ranks: the rest
of the order is shared out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from .draws import LARGEST_SEED, Draws

T = TypeVar("T")

_DRAWN_NUMEL = 1 << 24
"""Limits the orders that are drawn as torch's DistributedSampler draws them, in memory: 128 MB."""
_CHUNK = 4096
_ROUNDS = 6
_BLOCKS = 8
"""Limits how many units of each rank are read from a sampler at a time."""
_COMPARED = 64
"""Limits how many units the ranks compare. One is too few: samplers may start with the longest sample."""


class SampleOrder(Protocol):
    """Gives the units of an epoch: indices of samples, or the lists of indices of a batch sampler."""

    def __len__(self) -> int:
        """Return the number of units of an epoch. Raises TypeError if it is not known."""

    def share(self, epoch: int, start: int, rank: int, ranks: int, drop_last: bool) -> Share:
        """Return a rank's units of an epoch, without the first ``start`` units of all ranks.

        Every rank has as many: the rest that does not divide evenly is left out with ``drop_last``, otherwise
        filled up with the first units of the epoch.
        """


@dataclass(frozen=True)
class Share:
    """Is what a rank reads in an epoch."""

    units: Iterator[Any]
    first: Any
    """Identifies the order of all ranks: its first units, or what decides about it besides the seed."""


def shared_out(
    blocks: Iterable[list[T]], begun: Sequence[T], rank: int, ranks: int, drop_last: bool
) -> Iterator[T]:
    """Yield every ``ranks``-th of the units, beginning with the ``rank``-th; see :meth:`SampleOrder.share`.

    All ``blocks`` but the last have a multiple of ``ranks`` units. ``begun`` has the first units of the
    epoch, at least one for each rank if there are as many.
    """
    for block in blocks:
        over = len(block) % ranks
        if over and drop_last:
            del block[-over:]
        elif over:
            block += islice(cycle(begun), ranks - over)
        yield from block[rank::ranks]


# -- data sets with a length ------------------------------------------------------------------------


class Shuffled:
    """Is the order of ``length`` samples, drawn anew in each epoch from ``seed`` and the epoch's number, or
    their own order without ``shuffle``.

    Up to 2**24 samples have the order that torch's DistributedSampler gives. A longer order is computed index
    by index, so that a resume takes no time and no memory; with ``drawn``, it is drawn as well.
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int, contents: Any = None) -> None:
        """``contents`` identifies what the indices mean, where that is known."""
        self._length = length
        self._first = (length, contents)
        self._shuffle = shuffle
        self._seed = seed
        self.drawn = length <= _DRAWN_NUMEL

    def __len__(self) -> int:
        return self._length

    def share(self, epoch: int, start: int, rank: int, ranks: int, drop_last: bool) -> Share:
        """Return a rank's indices; see :meth:`SampleOrder.share`."""
        left = max(0, self._length - start)
        count = left // ranks if drop_last else -(-left // ranks)
        return Share(self._indices(self._lookup(epoch), start + rank, ranks, count), self._first)

    def _indices(
        self, lookup: Callable[[Tensor], Tensor], begin: int, stride: int, count: int
    ) -> Iterator[int]:
        for at in range(0, count, _CHUNK):
            places = begin + stride * torch.arange(at, min(count, at + _CHUNK))
            outside = places >= self._length  # what fills up is at the beginning of the epoch
            places[outside] = (places[outside] - self._length) % self._length
            yield from lookup(places).tolist()

    def _lookup(self, epoch: int) -> Callable[[Tensor], Tensor]:
        if not self._shuffle:
            return lambda places: places
        if self.drawn:
            generator = torch.Generator().manual_seed((self._seed + epoch) % LARGEST_SEED)
            drawn = torch.randperm(self._length, generator=generator)
            return lambda places: drawn[places]
        return Permutation(self._length, (self._seed + epoch) % LARGEST_SEED)


class Permutation:
    """Maps 0..length-1 onto itself in an order that ``seed`` decides, each index by itself.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of an even number of bits, whatever its
    round function is; a result outside is sent through again until it is inside ("cycle walking", Black and
    Rogaway 2002), fewer than four times on average.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._half = max(1, (max(1, length - 1).bit_length() + 1) // 2)
        self._mask = numpy.uint64((1 << self._half) - 1)
        draws = torch.Generator().manual_seed(seed)
        keys = torch.randint(0, 1 << 62, (_ROUNDS,), generator=draws)
        self._keys = keys.numpy().astype(numpy.uint64)

    def __call__(self, places: Tensor) -> Tensor:
        """Return the indices at these places, both int64."""
        values = self._permute(places.numpy().astype(numpy.uint64))
        while (outside := values >= numpy.uint64(self._length)).any():
            values[outside] = self._permute(values[outside])
        return torch.from_numpy(values.astype(numpy.int64))

    def _permute(self, values: Any) -> Any:
        left = values >> numpy.uint64(self._half)
        right = values & self._mask
        for key in self._keys:
            mixed = _mix(right ^ key) & self._mask
            left, right = right, left ^ mixed
        return left << numpy.uint64(self._half) | right


def _mix(values: Any) -> Any:
    """Spread 64-bit numbers: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ values >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    return values ^ values >> numpy.uint64(31)


# -- samplers of the script -------------------------------------------------------------------------


class Given:
    """Is the order of a script's sampler or batch sampler, which yields the units of all ranks.

    Each epoch calls the sampler's ``set_epoch``, and seeds its torch ``generator`` with the seed it had at
    first plus the epoch. Draws from global generators follow from ``seed``. So every rank and every resumed
    run gets the same order.
    """

    def __init__(self, sampler: Iterable[Any], *, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._seeds: dict[int, int] = {}
        """Holds the first seed of each generator."""

    def __len__(self) -> int:
        if isinstance(self._sampler, Sized):
            return len(self._sampler)
        raise TypeError(f"{type(self._sampler).__name__} has no length")

    def share(self, epoch: int, start: int, rank: int, ranks: int, drop_last: bool) -> Share:
        """Return a rank's units; see :meth:`SampleOrder.share`."""
        draws = Draws(self._seed + epoch)
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            self._begin(sampler, epoch)
        with draws.active():
            units = iter(self._sampler)
            begun = list(islice(units, max(ranks, _COMPARED)))
        left = islice(chain(begun, units), start, None)
        return Share(shared_out(draws.blocks(left, _BLOCKS * ranks), begun, rank, ranks, drop_last), begun)

    def _begin(self, sampler: Any, epoch: int) -> None:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            first = self._seeds.setdefault(id(sampler), generator.initial_seed())
            generator.manual_seed((first + epoch) % LARGEST_SEED)
