"""Test stores of shards: tiles are opened, read ahead and closed in order, and new values go to one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.zero.layout import TILE_ALIGN, Range, cuts_of, tile_ranges
from zlaunch.runtime.zero.store import (
    Access,
    DeviceStore,
    DeviceValues,
    OpenTile,
    TileView,
    open_all,
    open_tiles,
    take_changed,
)


class Logged(DeviceStore):
    """A store with room for two open tiles, which writes down what happens to them."""

    def __init__(self, tiles: int, fails: int | None = None) -> None:
        master = torch.arange(float(tiles))
        super().__init__(master, DeviceValues(master), [])
        self.tiles = [(i, i + 1) for i in range(tiles)]
        self.log: list[str] = []
        self.opened, self.fails = 0, fails

    @property
    def has_room(self) -> bool:
        return self.opened < 2

    def open(self, tile: Range, access: Access) -> OpenTile:
        self.opened += 1
        self.log.append(f"open {tile[0]}")
        return _LoggedTile(self, TileView(*tile, self.master[slice(*tile)]))

    def drain(self) -> None:
        self.log.append("drain")


class _LoggedTile(OpenTile):
    def __init__(self, store: Logged, view: TileView) -> None:
        super().__init__(store.values, view)
        self._store = store

    def wait(self) -> TileView:
        if self._store.fails == self._view.start:
            raise OSError("the disk")
        return self._view

    def close(self) -> None:
        self._end("close")

    def abandon(self) -> None:
        self._end("abandon")

    def _end(self, how: str) -> None:
        self._store.opened -= 1
        self._store.log.append(f"{how} {self._view.start}")


def test_tiles_are_read_ahead_and_closed_in_order() -> None:
    store = Logged(3)
    with open_tiles([(store, tile, index) for index, tile in enumerate(store.tiles)], Access.WRITE) as tiles:
        for index, _, view in tiles:
            store.log.append(f"use {index} {view.start}")
    assert store.log == [
        *("drain", "open 0", "open 1", "use 0 0", "close 0", "open 2", "use 1 1"),
        *("close 1", "use 2 2", "close 2", "drain"),
    ]


def test_an_exception_writes_nothing_and_leaves_nothing_open() -> None:
    store = Logged(3)
    with pytest.raises(KeyError), open_all(store, Access.WRITE) as tiles:
        for _ in tiles:
            raise KeyError
    assert store.log == ["drain", "open 0", "open 1", "abandon 0", "abandon 1"] and not store.opened


def test_a_tile_that_cannot_be_read_ends_the_loop() -> None:
    store = Logged(3, fails=1)
    with pytest.raises(OSError, match="the disk"), open_all(store, Access.READ) as tiles:
        for _ in tiles:
            pass
    assert store.log[-2:] == ["abandon 1", "abandon 2"] and "close 0" in store.log and not store.opened


def test_new_values_are_written_beside_the_master() -> None:
    values = torch.zeros(6, dtype=torch.bfloat16)
    store = DeviceStore(torch.arange(6.0), DeviceValues(values), [(0, 6)])
    with open_all(store, Access.MASTER) as tiles:
        for _, tile, view in tiles:
            view.master += 1
            tile.publish()
    assert values.tolist() == [1, 2, 3, 4, 5, 6] and store.compute_copy is values
    assert DeviceStore(store.master, DeviceValues(store.master), []).compute_copy is None


def test_gradients_of_a_step_are_added() -> None:
    store = DeviceStore(torch.zeros(4), DeviceValues(torch.zeros(4)), [(0, 1), (1, 4)])
    for first in (True, False):
        shard = store.room_for_grad(first, torch.bfloat16, torch.float32)
        assert shard.dtype == (torch.float32 if first else torch.bfloat16)
        shard.copy_(torch.arange(4))
        store.add_grad(shard, first=first, stays=False)
    assert store.has_grad and store.grad().tolist() == [0, 2, 4, 6]
    assert [float(square) for square in store.grad_squares()] == pytest.approx([0, 56], rel=1e-6)
    memory = store.grad()
    store.drop_grad()
    assert not store.has_grad and store.room_for_grad(True, torch.float32, torch.float32) is memory


def test_only_what_was_changed_loses_digits() -> None:
    master = torch.tensor([1.001, 2.001, 3.001])
    values = master.to(torch.bfloat16)
    values[1] = 5
    take_changed(master, values)
    assert master.tolist() == torch.tensor([1.001, 5, 3.001]).tolist()


@given(st.integers(0, 10 * TILE_ALIGN), st.integers(1, 3 * TILE_ALIGN))
def test_tiles_cover_a_shard(numel: int, tile_numel: int) -> None:
    tiles = tile_ranges(numel, tile_numel)
    assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles)][: len(tiles)]
    assert sum(stop - start for start, stop in tiles) == numel
    assert all(start % TILE_ALIGN == 0 for start, _ in tiles)
    pieces = [(numel // 3, numel // 2), (numel // 2, numel)]
    cuts = cuts_of(pieces, numel, tile_numel)
    assert sum(stop - start for start, stop in cuts) == numel - numel // 3
    assert all(any(low <= start and stop <= high for low, high in tiles) for start, stop in cuts)


@pytest.mark.parametrize("same", [False, True])
def test_a_write_forgets_where_a_step_had_written_the_values(same: bool) -> None:
    values = DeviceValues(torch.zeros(4))
    mark: Any = object()
    values.settled = mark
    values.write(0, values.tensor if same else torch.ones(4))
    assert values.settled is None, "a gather would not wait for this write"
