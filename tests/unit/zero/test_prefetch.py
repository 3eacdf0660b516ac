"""Test remembering the order of blocks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.zero.hooks import OrderHint


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
