"""Test the state that an optimizer begins with, where a parameter has no elements here to show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.comm.shard_spec import ShardSpec, set_spec
from zlaunch.runtime.optim.slices import make_slices
from zlaunch.runtime.optim.step import give_initial_state, take_initial_state
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.unit import Unit

NUMEL = 16
EMPTY, FULL, SCALAR = (0,), (NUMEL,), ()


def _sharded(optimizer: torch.optim.Optimizer) -> list[tuple[int, Tensor, dict[str, Any]]]:
    """Move the initial state to a unit with a parameter of NUMEL elements in each group; return of each slice
    the group, the leaf and its state.
    """
    count = len(optimizer.param_groups)
    unit = Unit(
        "u",
        [f"p{index}" for index in range(count)],
        [nn.Parameter(torch.zeros(NUMEL)) for _ in range(count)],
        make_layout([NUMEL] * count, list(range(count)), 2),
        FakeComm(),
        dtype=torch.float32,
        shard_optimizer=False,
        shard_params=False,
    )
    initial, slices = take_initial_state(optimizer), make_slices([unit], whole=False)
    give_initial_state(optimizer, initial, slices)
    return [(part.group, part.leaf, optimizer.state[part.leaf]) for part in slices if part.leaf is not None]


@pytest.mark.parametrize(
    "groups",
    [
        [[EMPTY, FULL]],
        [[FULL, EMPTY]],
        [[EMPTY, SCALAR, FULL]],
        [[EMPTY]],
        [[EMPTY], [FULL]],
        [[EMPTY, EMPTY], [EMPTY]],
    ],
)
def test_every_slice_begins_with_the_accumulator_of_adagrad(groups: list[list[tuple[int, ...]]]) -> None:
    given = [{"params": [nn.Parameter(torch.ones(shape)) for shape in shapes]} for shapes in groups]
    optimizer = torch.optim.Adagrad(given, lr=0.1, initial_accumulator_value=0.25)
    found = _sharded(optimizer)
    assert [group for group, _, _ in found] == list(range(len(groups)))
    for _, leaf, state in found:
        assert torch.equal(state["sum"], torch.full((NUMEL,), 0.25))
        assert state["step"].shape == () and float(state["step"]) == 0
        assert not state["sum"].requires_grad and state["sum"] is not leaf


class Strange(torch.optim.SGD):
    """Begins with state, and takes an argument that its groups do not have."""

    def __init__(self, params: Any, start: float) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = torch.full_like(parameter, start)


def test_an_initial_value_that_nothing_shows_is_refused() -> None:
    shown = Strange([nn.Parameter(torch.ones(shape)) for shape in (EMPTY, FULL)], 3.0)
    ((_, _, state),) = _sharded(shown)
    assert torch.equal(state["average"], torch.full((NUMEL,), 3.0))
    with pytest.raises(ValueError, match="optimizer Strange has an unknown initial value for average"):
        _sharded(Strange([nn.Parameter(torch.ones(EMPTY))], 3.0))


def test_values_that_differ_are_refused() -> None:
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(shape)) for shape in (EMPTY, FULL)])
    optimizer.state[optimizer.param_groups[0]["params"][1]]["sum"][3] = 1.0
    with pytest.raises(ValueError, match="already has state"):
        take_initial_state(optimizer)


def test_an_optimizer_made_before_its_parameters_were_cut() -> None:
    parameter = nn.Parameter(torch.ones(2 * NUMEL))
    optimizer = torch.optim.Adagrad([parameter], lr=0.1, initial_accumulator_value=0.25)
    parameter.data = torch.ones(NUMEL)
    boxes = tuple((((start, start + NUMEL),),) for start in (0, NUMEL))
    set_spec(parameter, ShardSpec((2 * NUMEL,), boxes, 0, None))
    ((_, _, state),) = _sharded(optimizer)
    assert torch.equal(state["sum"], torch.full((NUMEL,), 0.25))
