"""Test what a group of ranks does with the parts that it has received."""

from __future__ import annotations

import pytest
import torch

from zlaunch.runtime.comm.link import RankLink
from zlaunch.runtime.comm.pending import sum_pieces

CPU = torch.device("cpu")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_rank_has_its_part_of_a_tensor(position: int) -> None:
    link = RankLink(CPU, 3, position, None, None)
    assert link.part_of(torch.arange(12)).tolist() == list(range(4 * position, 4 * position + 4))


def test_sums_over_gloo_are_wider_than_what_is_sent() -> None:
    several, one = RankLink(CPU, 2, 0, None, None), RankLink(CPU, 1, 0, None, None)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert several.reduced_dtype(dtype) is torch.float32
        assert one.reduced_dtype(dtype) is dtype
    assert several.reduced_dtype(torch.float64) is torch.float64


def test_pieces_are_summed_in_the_wider_dtype() -> None:
    fine = 2.0**-9
    pieces = torch.tensor([[1.0, 2.0], [fine, fine], [fine, fine]], dtype=torch.bfloat16)
    for first in range(3):
        shard = torch.full((2,), float("nan"))
        sum_pieces(shard, pieces, first)
        assert shard.tolist() == [1 + 2 * fine, 2 + 2 * fine]
