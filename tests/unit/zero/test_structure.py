"""Test finding tensors in outputs, remembering the order of blocks, comparing models of ranks."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.handles.consistency import Signature, first_difference
from zlaunch.runtime.zero.output_tensors import tensors_in
from zlaunch.runtime.zero.prefetch import OrderHint

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: Any = None
    logits: Any = None


def same(found: Any, *expected: torch.Tensor) -> bool:
    found = list(found)
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [A]),
        (torch.nn.Parameter(A), None),
        ((A, [B, (C,)]), [A, B, C]),
        (Pair(A, B), [A, B]),
        ({"x": A, "y": {"z": B}}, [A, B]),
        (OrderedDict(b=B, a=A), [B, A]),
        (UserDict(x=A), [A]),
        (Output(A, (B, C)), [A, B, C]),
        ([Output(loss=A), {"k": Output(logits=B)}], [A, B]),
        ({A}, [A]),
        ((A, A), [A, A]),
    ],
)
def test_finds_tensors_in_order(value: Any, expected: list[torch.Tensor] | None) -> None:
    assert same(tensors_in(value), *([value] if expected is None else expected))


@pytest.mark.parametrize(
    "value", [None, 3, 1.5, "text", b"bytes", object(), Output, [], {}, torch.float32, {1: "x"}]
)
def test_finds_nothing_where_there_is_none(value: Any) -> None:
    assert list(tensors_in(value)) == []


def test_a_structure_that_holds_itself_ends() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    found = list(tensors_in(loop))
    assert found and all(tensor is A for tensor in found)


def test_hugging_face_style_mapping_and_dataclass_is_visited_once() -> None:
    @dataclass
    class Both(OrderedDict[str, Any]):
        loss: Any = None

        def __post_init__(self) -> None:
            self["loss"] = self.loss

    assert same(tensors_in(Both(loss=A)), A)


# -- the order of blocks


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


# -- models of two ranks

W: Signature = ("w", (2, 3), "torch.float32", True)
V: Signature = ("v", (3,), "torch.float32", True)


@pytest.mark.parametrize(
    ("reference", "other", "words"),
    [
        ([W, V], [V, W], "where rank 0 has parameter w, it has v"),
        ([W], [("w", (2, 4), "torch.float32", True)], "parameter w has shape [2, 4], on rank 0 [2, 3]"),
        (
            [W],
            [("w", (2, 3), "torch.float16", True)],
            "parameter w is torch.float16, on rank 0 torch.float32",
        ),
        ([W], [("w", (2, 3), "torch.float32", False)], "parameter w is frozen, on rank 0 the opposite"),
        ([("w", (2, 3), "torch.float32", False)], [W], "parameter w is trainable, on rank 0 the opposite"),
        ([W], [W, V], "only it has parameter v"),
        ([W, V], [W], "only rank 0 has parameter v"),
        ([], [W], "only it has parameter w"),
    ],
)
def test_first_difference_in_words(reference: list[Signature], other: list[Signature], words: str) -> None:
    assert first_difference(reference, other) == words


signatures = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.lists(st.integers(1, 2), max_size=2).map(tuple),
        st.sampled_from(["torch.float32", "torch.float16"]),
        st.booleans(),
    ),
    max_size=3,
)


@given(signatures, signatures)
def test_no_difference_exactly_where_the_lists_are_equal(
    mine: list[Signature], other: list[Signature]
) -> None:
    assert (first_difference(mine, other) is None) == (mine == other)
