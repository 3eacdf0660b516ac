"""Records the order in which a rank has gathered and reduced units, and compares it with the other ranks'."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from torch import Tensor

_REMEMBERED = 4096
"""Limits the collectives whose order is kept, to name the first that differs between the ranks."""
_HASH_BITS = 12
_MASK = (1 << _HASH_BITS) - 1
_PRIME = 16_777_213  # below 2 ** (2 * _HASH_BITS)


class Order:
    """Keeps a rolling hash of the labels of each channel's collectives, and the labels themselves since the
    orders were last known to agree.
    """

    def __init__(self, world_size: int, channels: int) -> None:
        self._world_size = world_size
        self._recent: list[deque[int]] = [deque(maxlen=_REMEMBERED) for _ in range(channels)]
        self._hashes = [0] * channels

    def add(self, channel: int, label: int) -> None:
        """Note that a collective begins."""
        self._recent[channel].append(label)
        self._hashes[channel] = (self._hashes[channel] * 31 + label + 1) % _PRIME

    def marks(self) -> list[float]:
        """Return numbers to be summed over the ranks and given to :meth:`differs`: each part of each hash,
        and its square.
        """
        found: list[float] = []
        for value in self._hashes:
            for part in (value & _MASK, value >> _HASH_BITS & _MASK):
                found += [float(part), float(part * part)]
        return found

    def differs(self, sums: Tensor) -> Tensor:
        """Tell whether the ranks' orders differ, 0-dim bool, from the sums of the marks (float64).

        Numbers are equal on all of n ranks if n times the sum of their squares is the square of their sum;
        they are small enough for float64 to be exact.
        """
        pairs = sums.view(-1, 2)
        return (pairs[:, 1] * self._world_size != pairs[:, 0].square()).any()

    def forget(self) -> None:
        """Forget the labels so far, whose order has been equal on all ranks."""
        for labels in self._recent:
            labels.clear()

    def recent(self) -> list[list[int]]:
        """Return the labels since then, by channel."""
        return [list(labels) for labels in self._recent]

    def first_difference(
        self, everyone: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[int, int, int | None, int | None]:
        """Find where the :meth:`recent` of all ranks part: return channel, rank, and that rank's and rank 0's
        label; None for a label where a rank has no further one.
        """
        for channel in range(len(self._hashes)):
            for rank, lists in enumerate(everyone):
                for mine, other in itertools.zip_longest(everyone[0][channel], lists[channel]):
                    if mine != other:
                        return channel, rank, other, mine
        return 0, 0, None, None
