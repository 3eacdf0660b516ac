"""Test the flat layout of a unit: every element is somewhere, once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.comm.link import ALIGN_NUMEL
from zlaunch.runtime.zero.layout import Layout, make_layout

worlds = st.integers(1, 9)
parameters = st.lists(st.tuples(st.integers(0, 300), st.integers(-1, 3)), max_size=12).map(
    lambda given: sorted(given, key=lambda pair: pair[1])
)
aligns = st.sampled_from([1, 2, 7, ALIGN_NUMEL, 64])


def laid_out(listed: list[tuple[int, int]], world: int, align: int) -> Layout:
    return make_layout([n for n, _ in listed], [g for _, g in listed], world, align)


def owners(layout: Layout) -> list[int | None]:
    """For each element the slot that holds it, found the slow way."""
    found: list[int | None] = [None] * layout.numel
    for index, slot in enumerate(layout.slots):
        for element in range(slot.offset, slot.offset + slot.numel):
            assert found[element] is None, "two slots share an element"
            found[element] = index
    return found


@given(parameters, worlds, aligns)
def test_slots_keep_their_order_size_and_group_and_start_aligned(
    listed: list[tuple[int, int]], world: int, align: int
) -> None:
    layout = laid_out(listed, world, align)
    assert [(slot.numel, slot.group) for slot in layout.slots] == listed
    at = 0
    for slot in layout.slots:
        assert slot.offset % align == 0
        assert 0 <= slot.offset - at < align
        assert slot.stop == slot.offset + slot.numel
        at = slot.stop
    assert at <= layout.numel


@given(parameters, worlds, aligns)
def test_aligned_shards_tile_the_unit_without_waste(
    listed: list[tuple[int, int]], world: int, align: int
) -> None:
    layout = laid_out(listed, world, align)
    ranges = [layout.shard_range(rank) for rank in range(world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.numel
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert {stop - start for start, stop in ranges} == {layout.shard_numel}
    assert layout.shard_numel > 0 and layout.shard_numel % align == 0
    used = layout.slots[-1].stop if layout.slots else 0
    assert layout.numel - used < align * world or layout.numel == align * world


@given(parameters, worlds, aligns)
def test_gaps_are_exactly_what_no_slot_holds(listed: list[tuple[int, int]], world: int, align: int) -> None:
    layout = laid_out(listed, world, align)
    gaps = layout.gaps()
    assert all(start < stop for start, stop in gaps)
    covered = [element for start, stop in gaps for element in range(start, stop)]
    assert covered == [element for element, owner in enumerate(owners(layout)) if owner is None]


@given(parameters, worlds, aligns)
def test_overlaps_of_the_shards_hold_every_element_of_every_slot_once(
    listed: list[tuple[int, int]], world: int, align: int
) -> None:
    layout = laid_out(listed, world, align)
    found: list[int | None] = [None] * layout.numel
    for rank in range(world):
        start, stop = layout.shard_range(rank)
        for index, low, high in layout.overlaps(start, stop):
            assert start <= low < high <= stop
            for element in range(low, high):
                assert found[element] is None
                found[element] = index
    assert found == owners(layout)


@given(parameters, worlds, aligns, st.data())
def test_overlaps_of_any_range(
    listed: list[tuple[int, int]], world: int, align: int, data: st.DataObject
) -> None:
    layout = laid_out(listed, world, align)
    start = data.draw(st.integers(0, layout.numel))
    stop = data.draw(st.integers(start, layout.numel))
    held = [(i, e) for i, low, high in layout.overlaps(start, stop) for e in range(low, high)]
    expected = [
        (owner, e) for e, owner in enumerate(owners(layout)) if start <= e < stop and owner is not None
    ]
    assert held == expected


@given(parameters, worlds, aligns)
def test_pieces_are_one_run_a_group_with_its_elements_and_only_gaps_besides(
    listed: list[tuple[int, int]], world: int, align: int
) -> None:
    layout = laid_out(listed, world, align)
    of = owners(layout)
    group_of = [None if owner is None else layout.slots[owner].group for owner in of]
    for rank in range(world):
        start, stop = layout.shard_range(rank)
        pieces = layout.pieces(start, stop)
        present = {group for group in group_of[start:stop] if group is not None and group >= 0}
        assert [piece.group for piece in pieces] == sorted(present)
        for piece in pieces:
            run = group_of[start + piece.start : start + piece.stop]
            assert 0 <= piece.start < piece.stop <= stop - start
            assert set(run) <= {piece.group, None}, "a run may contain its own group and gaps only"
            assert run[0] == run[-1] == piece.group
            assert run.count(piece.group) == group_of[start:stop].count(piece.group)


def test_a_known_layout() -> None:
    layout = make_layout([5, 20, 3], [0, 0, 1], world_size=2)
    assert [slot.offset for slot in layout.slots] == [0, 16, 48]
    assert (layout.numel, layout.shard_numel) == (64, 32)
    assert layout.gaps() == [(5, 16), (36, 48), (51, 64)]
    assert layout.overlaps(*layout.shard_range(1)) == [(1, 32, 36), (2, 48, 51)]
    assert [(p.group, p.start, p.stop) for p in layout.pieces(*layout.shard_range(1))] == [
        (0, 0, 4),
        (1, 16, 19),
    ]


def test_a_unit_without_parameters_still_has_a_shard_for_every_rank() -> None:
    layout = make_layout([], [], world_size=3)
    assert layout.shard_numel == ALIGN_NUMEL and layout.gaps() == [(0, 3 * ALIGN_NUMEL)]


def test_numels_and_groups_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError):
        make_layout([1, 2], [0], world_size=1)
