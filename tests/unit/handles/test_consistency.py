"""Test comparing the models of two ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.runtime.script.accept import Signature, first_difference

W: Signature = ("w", (2, 3), "torch.float32", True)
V: Signature = ("v", (3,), "torch.float32", True)


@pytest.mark.parametrize(
    ("reference", "other", "words"),
    [
        ([W, V], [V, W], "it has parameter v, rank 0 has w"),
        ([W], [("w", (2, 4), "torch.float32", True)], "parameter w has shape [2, 4], but [2, 3] on rank 0"),
        (
            [W],
            [("w", (2, 3), "torch.float16", True)],
            "parameter w is torch.float16, but torch.float32 on rank 0",
        ),
        ([W], [("w", (2, 3), "torch.float32", False)], "parameter w is frozen, but not on rank 0"),
        ([("w", (2, 3), "torch.float32", False)], [W], "parameter w is trainable, but not on rank 0"),
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
