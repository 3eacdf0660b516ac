"""Test which numbers of experts are refused."""

from __future__ import annotations

import pytest
import torch

from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.parallel.expert import Experts, bounds, check_bounds, check_kind


@pytest.mark.parametrize(("numbers", "wanted"), [([[3, 1]], [0, 3]), ([[-1, 2]], [-1, 2]), ([], [0, 0])])
def test_bounds_hold_0_too(numbers: list[list[int]], wanted: list[int]) -> None:
    assert bounds(torch.tensor(numbers, dtype=torch.int64)).tolist() == wanted


@pytest.mark.parametrize(("lowest", "highest", "wrong"), [(-2, 3, -2), (0, 4, 4), (-1, 9, 9), (-5, 4, 4)])
def test_a_number_of_no_expert_is_named(lowest: int, highest: int, wrong: int) -> None:
    with pytest.raises(
        ParameterError, match=f"Experts: a token is routed to expert {wrong}: expected 0 to 3"
    ):
        check_bounds("Experts", lowest, highest, 4)


def test_all_experts_and_none_may_be_chosen() -> None:
    check_bounds("Experts", -1, 3, 4)
    for dtype in (torch.int32, torch.int64):
        check_kind("Experts", torch.zeros(1, dtype=dtype))
    with pytest.raises(ParameterError, match="an index of int64"):
        check_kind("Experts", torch.zeros(1))


@pytest.mark.parametrize("number", [2, 3, -2])
def test_a_call_with_such_a_number_computes_nothing(number: int) -> None:
    experts = Experts([torch.nn.Linear(4, 4) for _ in range(2)])
    index = torch.tensor([[0], [number], [1]])
    with pytest.raises(ParameterError, match=f"routed to expert {number}: expected 0 to 1"):
        experts(torch.randn(3, 4), index, torch.ones(3, 1))


def test_a_token_of_no_expert_gets_nothing() -> None:
    experts = Experts([torch.nn.Linear(4, 4) for _ in range(2)])
    found = experts(torch.randn(3, 4), torch.tensor([[0], [-1], [1]]), torch.ones(3, 1))
    assert found[1].eq(0).all() and found[[0, 2]].ne(0).any(1).all()
