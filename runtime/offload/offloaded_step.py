"""Steps the shards that are off the device, tile by tile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.pending import Pending
from ..optim.slices import ShardSlice
from ..optim.update_rule import SliceUpdate, State, UpdateRule, is_elementwise
from ..profiler import named
from ..zero.layout import Range
from ..zero.store import Access, DeviceStore, ShardStore, TileView, open_tiles
from ..zero.unit import Unit

_Work = tuple[ShardStore, Range, tuple[Unit, list[ShardSlice], bool]]
"""Holds a tile, its unit, its slices, and whether it is the unit's last tile."""


def step_tiles(
    rule: UpdateRule, slices: Sequence[ShardSlice], state: State, after: torch.cuda.Event | None
) -> Iterator[tuple[Unit, list[Pending]]]:
    """Update every unit that is off the device, in the order of the units, and yield each with the uploads of
    its new values; none of them starts before ``after``.

    While one tile is updated, the new values of those before it are uploaded and those after it are read. The
    work is listed at once; the result may be iterated over by another thread, and raises DiskError: the step
    is then incomplete, and training cannot go on.
    """
    return _step_tiles(rule, _work(slices), state, after)


def _step_tiles(
    rule: UpdateRule, work: Sequence[_Work], state: State, after: torch.cuda.Event | None
) -> Iterator[tuple[Unit, list[Pending]]]:
    uploads: list[Pending] = []
    with open_tiles(work, Access.STEP) as tiles:
        for (unit, own, is_last), tile, view in tiles:
            with named(f"step {unit.name}"):
                _update(rule, own, view, state)
                uploads.append(tile.publish(after))
            if is_last:
                yield unit, uploads
                uploads = []


def _work(slices: Sequence[ShardSlice]) -> list[_Work]:
    """List the tiles that have something to update."""
    by_unit: dict[int, list[ShardSlice]] = {}
    for part in slices:
        if part.used:
            by_unit.setdefault(id(part.unit), []).append(part)
    work: list[_Work] = []
    for own in by_unit.values():
        unit, store = own[0].unit, own[0].unit.store
        if store is None or isinstance(store, DeviceStore) or not store.has_grad:
            continue
        tiles = [
            (tile, inside)
            for tile in store.tiles
            if (inside := [part for part in own if tile[0] <= part.start and part.stop <= tile[1]])
        ]
        work += [(store, tile, (unit, inside, tile == tiles[-1][0])) for tile, inside in tiles]
    return work


def _update(rule: UpdateRule, slices: Sequence[ShardSlice], tile: TileView, state: State) -> None:
    assert tile.grad is not None
    if tile.out is not None:
        _fill_uncovered(tile.out, tile.master, [part.span(tile) for part in slices])
    on_disk = slices[0].leaf is None
    if on_disk:
        state = defaultdict(dict)
    updates = []
    for part in slices:
        span = part.span(tile)
        leaf = tile.master[span].detach().requires_grad_() if part.leaf is None else part.leaf
        if on_disk and (own := {**part.scalars, **part.tensors_in(tile, state)}):
            state[leaf] = own
        updates.append(
            SliceUpdate(
                part.group, leaf, tile.grad[span], None if tile.out is None else tile.out[span], part.place
            )
        )
    rule.apply(updates, state)
    if on_disk:
        for part, update in zip(slices, updates, strict=True):
            _keep_on_disk(part, tile, update.leaf, state.get(update.leaf, {}))


def _fill_uncovered(out: Tensor, master: Tensor, spans: Sequence[slice]) -> None:
    """Copy the elements that no update will write: padding, and parameters without a gradient."""
    at = 0
    for span in [*spans, slice(out.numel(), out.numel())]:
        if span.start > at:
            out[at : span.start].copy_(master[at : span.start])
        at = span.stop


def _keep_on_disk(part: ShardSlice, tile: TileView, leaf: Tensor, after: dict[str, Any]) -> None:
    """Write a slice's state after a step to where the tile keeps it."""
    names = sorted(name for name, value in after.items() if is_elementwise(value, leaf))
    if len(names) > len(tile.state):
        raise RuntimeError(
            f"the optimizer has {len(names)} values per element ({', '.join(names)}), but had "
            f"{len(tile.state)} when its NVMe file was created: set momentum and amsgrad before "
            "zlaunch.initialize"
        )
    for name, region in zip(names, tile.state, strict=False):
        kept = region[part.span(tile)]
        if after[name].data_ptr() != kept.data_ptr():
            kept.copy_(after[name])
    part.scalars = {name: value for name, value in after.items() if name not in names}
    part.on_disk = names
