"""Defines the mesh of ranks: how many share what, and which ranks differ in one thing alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Holds the sizes of the axes. A rank's number counts the positions on pipeline, data, expert, sequence
    and tensor, the last one fastest. Ranks with different positions on ``data`` or ``expert`` train on
    different samples.
    """

    data: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of all axes by name, outermost first."""
        return {
            "pipeline": self.pipeline,
            "data": self.data,
            "expert": self.expert,
            "sequence": self.sequence,
            "tensor": self.tensor,
        }

    @property
    def axes(self) -> dict[str, int]:
        """Return the sizes of the axes by name: data, and those with several ranks."""
        return {name: size for name, size in self.sizes.items() if name == "data" or size > 1}

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def samples(self) -> int:
        """Return how many ranks train on different samples."""
        return self.data * self.expert

    def sample_position(self, rank: int) -> int:
        """Return a rank's place among those that train on different samples."""
        return rank // (self.sequence * self.tensor) % self.samples

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each of the axes that are named by :attr:`axes`."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def ranks_along(self, name: str, rank: int) -> list[int]:
        """Return the ranks that differ from a rank in their position on one axis alone, by that position."""
        names = list(self.sizes)
        sizes = list(self.sizes.values())
        size = self.sizes[name]
        stride = math.prod(sizes[names.index(name) + 1 :])
        first = rank - rank // stride % size * stride
        return [first + place * stride for place in range(size)]

    def groups(self, *names: str) -> list[list[int]]:
        """Return the groups of ranks that differ in their positions on these axes alone, in rank order."""
        found: dict[tuple[int, ...], list[int]] = {}
        sizes = self.sizes
        for rank, place in enumerate(product(*(range(size) for size in sizes.values()))):
            rest = tuple(at for name, at in zip(sizes, place, strict=True) if name not in names)
            found.setdefault(rest, []).append(rank)
        return list(found.values())
