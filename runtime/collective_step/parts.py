"""Shows the parts of parameters that a rank steps, tile by tile, in whatever memory they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..optim.slices import ShardSlice
from ..optim.update_rule import State
from ..zero.layout import Range
from ..zero.store import Access, OpenTile, ShardStore, TileView, open_tiles
from ..zero.unit import Unit


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPart:
    """Describes a slice's elements of its one parameter, without padding."""

    slice: ShardSlice
    index: int
    """Numbers the parameter in its unit."""
    low: int
    high: int
    """Bound the elements in the unit's flat buffer."""

    @property
    def unit(self) -> Unit:
        """Return the unit of the parameter."""
        return self.slice.unit

    @property
    def group(self) -> int:
        """Return the index of the parameter's group."""
        return self.slice.group

    @property
    def offset(self) -> int:
        """Return where in its parameter the part begins."""
        return self.low - self.unit.layout.slots[self.index].offset

    def of(self, tile: TileView, tensor: Tensor) -> Tensor:
        """Return the part's elements of a flat tensor over the tile."""
        start = self.low - self.unit.start - tile.start
        return tensor[start : start + self.high - self.low]

    def states(self, tile: TileView, state: State, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the part's elements of the optimizer's state, by name; zeros where a name is new. ``names``
        are sorted.
        """
        part = self.slice
        if part.leaf is None:
            if part.on_disk != list(names):
                for region in tile.state[: len(names)]:
                    region[part.span(tile)].zero_()
                part.on_disk = list(names)
        else:
            own = state.setdefault(part.leaf, {})
            for name in names:
                if name not in own:
                    own[name] = torch.zeros_like(part.leaf.detach())
        found = part.tensors_in(tile, state)
        return {name: self.inside(found[name]) for name in names}

    def is_in(self, tile: TileView) -> bool:
        """Tell whether a tile of the unit has the slice."""
        return tile.start <= self.slice.start and self.slice.stop <= tile.stop

    def inside(self, tensor: Tensor) -> Tensor:
        """Return the part's elements of a tensor over its slice."""
        start = self.low - self.unit.start - self.slice.start
        return tensor[start : start + self.high - self.low]

    def entries(self, state: State) -> dict[str, Any]:
        """Return the slice's other state entries, which may be set."""
        part = self.slice
        return part.scalars if part.leaf is None else state.setdefault(part.leaf, {})

    def count_step(self, state: State) -> float:
        """Add 1 to the part's step count; return it."""
        own = self.entries(state)
        own["step"] = own["step"] + 1.0 if "step" in own else torch.tensor(1.0)
        return float(own["step"])


TileWork = tuple[ShardStore, Range, Sequence[ParameterPart]]
"""Holds a tile of a store and its parts."""


def parts_of(slices: Sequence[ShardSlice]) -> list[ParameterPart]:
    """List the parts of slices that have one parameter each."""
    found = []
    for part in slices:
        first = part.unit.start
        inside = part.unit.layout.overlaps(first + part.start, first + part.stop)
        found += [ParameterPart(part, index, low, high) for index, low, high in inside]
    return found


def work_on(parts: Sequence[ParameterPart]) -> list[TileWork]:
    """List the tiles that have parts with a gradient, in the order of the units."""
    by_unit: dict[int, list[ParameterPart]] = {}
    for part in parts:
        store = part.unit.store
        if part.slice.used and store is not None and store.has_grad:
            by_unit.setdefault(id(part.unit), []).append(part)
    work: list[TileWork] = []
    for own in by_unit.values():
        store = own[0].unit.store
        assert store is not None
        for start, stop in store.tiles:
            inside = [p for p in own if start <= p.slice.start and p.slice.stop <= stop]
            if inside:
                work.append((store, (start, stop), inside))
    return work


def each_tile(work: Sequence[TileWork]) -> Iterator[tuple[Sequence[ParameterPart], OpenTile, TileView]]:
    """Yield the parts of each tile with the tile, open for a step. Raises DiskError."""
    with open_tiles(work, Access.STEP) as tiles:
        yield from tiles


def by_group(parts: Sequence[ParameterPart]) -> Mapping[int, list[ParameterPart]]:
    """Return parts by their group's index."""
    found: dict[int, list[ParameterPart]] = {}
    for part in parts:
        found.setdefault(part.group, []).append(part)
    return found


_CACHED = 1 << 16
"""Elements whose temporaries stay in the cache of a core."""


def cache_sized(parts: Sequence[ParameterPart], device: torch.device) -> Iterator[Sequence[ParameterPart]]:
    """Yield the same elements in lists of parts that one element after the other is computed from: few at a
    time on the CPU, where each operation would read and write memory otherwise, and all of them elsewhere.
    """
    if device.type != "cpu":
        yield parts
        return
    found: list[ParameterPart] = []
    room = _CACHED
    for part in parts:
        low = part.low
        while low < part.high:
            high = min(part.high, low + room)
            found.append(replace(part, low=low, high=high))
            room -= high - low
            low = high
            if not room:
                yield found
                found, room = [], _CACHED
    if found:
        yield found


def gradients(parts: Sequence[ParameterPart], tile: TileView, divisor: float) -> list[Tensor]:
    """Return the gradients of parts in the master's dtype, averaged and unscaled, as new tensors."""
    assert tile.grad is not None
    found = [part.of(tile, tile.grad).to(tile.master.dtype, copy=True) for part in parts]
    torch._foreach_mul_(found, 1.0 / divisor)
    return found
