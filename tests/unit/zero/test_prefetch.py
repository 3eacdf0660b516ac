"""Test remembering the order of blocks."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.zero.hooks import OrderHint, Prefetch


def passed(hint: OrderHint, *blocks: int) -> OrderHint:
    for block in blocks:
        hint.visit(block)
    hint.end()
    return hint


def test_no_hint_before_the_first_complete_pass() -> None:
    hint = OrderHint()
    hint.visit(1)
    hint.visit(2)
    assert hint.after(1) is None and not hint.is_last(2)
    hint.end()
    assert hint.after(1) == 2 and hint.is_last(2) and hint.after(2) is None


def test_the_latest_pass_is_the_hint_and_the_present_one_does_not_disturb_it() -> None:
    hint = passed(OrderHint(), 1, 2, 3)
    hint.visit(3)
    hint.visit(1)
    assert hint.after(1) == 2 and hint.is_last(3)
    hint.end()
    assert hint.after(3) == 1 and hint.after(1) is None and hint.is_last(1)


def test_the_first_follower_of_a_block_used_twice_counts_and_repeats_are_one_visit() -> None:
    hint = passed(OrderHint(), 1, 1, 2, 1, 3)
    assert (hint.after(1), hint.after(2), hint.after(3)) == (2, 1, None)


def test_an_empty_pass_keeps_the_hint() -> None:
    hint = passed(OrderHint(), 1, 2)
    hint.end()
    assert hint.after(1) == 2 and hint.is_last(2)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_hints_are_pairs_that_really_followed_each_other(blocks: list[int]) -> None:
    hint = passed(OrderHint(), *blocks)
    pairs = set(pairwise(blocks))
    for block in range(7):
        follower = hint.after(block)
        assert follower is None or (follower != block and (block, follower) in pairs)
        assert (follower is None) == (not any(a == block and b != block for a, b in pairs))
        assert hint.is_last(block) == (block == blocks[-1])


def used_first(order: OrderHint, *, numel: int, limit: int = 1000) -> list[int]:
    """Return the blocks of which a pass uses units first. Block i has one unit of 10 * i elements."""
    unit: Any = SimpleNamespace
    blocks: Any = [SimpleNamespace(units=[unit(shard_params=True, numel=10 * i, block=i)]) for i in range(6)]
    comm: Any = SimpleNamespace(world_size=2)
    prefetch = Prefetch(blocks, comm, numel=numel, max_live_numel=limit)
    found: list[Any] = prefetch.used_first(order)
    return [each.block for each in found]


def test_used_first_is_the_first_block_and_what_is_gathered_ahead_of_it() -> None:
    order = passed(OrderHint(), 3, 1, 2, 4, 5)
    assert used_first(order, numel=1) == [3, 1]
    assert used_first(order, numel=11) == [3, 1, 2]
    assert used_first(order, numel=1000) == [3, 1, 2, 4, 5]
    assert used_first(order, numel=1000, limit=60) == [3, 1, 2], "no more than may be unsharded at a time"
    assert used_first(order, numel=0) == [], "nothing is gathered ahead"


def test_nothing_is_used_first_before_the_first_pass() -> None:
    assert used_first(OrderHint(), numel=1000) == []


def test_used_first_ends_where_the_order_leads_in_a_circle() -> None:
    assert used_first(passed(OrderHint(), 1, 2, 1, 3), numel=1000) == [1, 2]
