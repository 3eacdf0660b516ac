"""``deepspeed.runtime.pipe.topology``: the ranks' places on named axes, the last one fastest."""

from __future__ import annotations

import math
from collections import namedtuple
from itertools import product
from typing import Any


def _named(axes: list[str]) -> Any:
    return namedtuple("ProcessCoord", axes)


class ProcessTopology:
    """Numbers the places on axes of so many ranks."""

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord = _named(self.axes)
        self.mapping: dict[Any, int] = {}
        for rank, place in enumerate(product(*map(range, self.dims))):
            self.mapping[self.ProcessCoord._make(place)] = rank

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis, 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a place, which names all axes."""
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    def get_coord(self, rank: int) -> Any:
        """Return a rank's place, with the axes as attributes."""
        return list(self.mapping)[rank]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at a position of an axis."""
        return [rank for place, rank in self.mapping.items() if getattr(place, axis) == idx]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ in their positions on an axis alone."""
        if axis not in self.axes:
            return []
        at, found = self.axes.index(axis), dict[tuple[int, ...], list[int]]()
        for place, rank in self.mapping.items():
            found.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(found.values())

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)


class PipeDataParallelTopology(ProcessTopology):
    """Has stages, and ranks of other samples in each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Has ranks that share layers, too."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
