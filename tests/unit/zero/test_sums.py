"""Test what a reducer sends of a sum over several backward passes, and what it forgets between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.comm.pending import Pending
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.reduce import GradientOptions, GradientReducer
from zlaunch.runtime.zero.unit import Unit

NUMEL = 32
FINE = 2.0**-9
"""Disappears in a bf16 sum with 1."""


class Seen(FakeComm):
    """Notes the dtype of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.dtype] = []

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int = 0) -> Pending:
        self.sent.append(bucket.dtype)
        return super().reduce_scatter(shard, bucket, label)

    def all_reduce(self, tensor: Tensor, label: int = 0) -> Pending:
        self.sent.append(tensor.dtype)
        return super().all_reduce(tensor, label)


def make(stage: int, dtype: torch.dtype | None = None, **more: Any) -> tuple[GradientReducer, Unit]:
    """Make a reducer of one bf16 unit."""
    comm = Seen()
    unit = Unit(
        "u",
        ["weight"],
        [nn.Parameter(torch.zeros(NUMEL))],
        make_layout([NUMEL], [0], 2),
        comm,
        dtype=torch.bfloat16,
        shard_optimizer=stage > 0,
        shard_params=False,
    )
    options = GradientOptions(transient=stage == 2, dtype=dtype, **more)
    return GradientReducer([unit], comm, options), unit


def run(reducer: GradientReducer, unit: Unit, *values: float, stage: int) -> list[torch.dtype]:
    """Run a pass for each value, of which the last one reduces (all do at stage 2); return what was sent."""
    comm = reducer.comm
    assert isinstance(comm, Seen)
    comm.sent.clear()
    for number, value in enumerate(values, 1):
        reducer.sync = stage == 2 or number == len(values)
        reducer.begin()
        reducer.add(unit, 0, torch.full((NUMEL,), value, dtype=torch.bfloat16))
        reducer.finish()
    return comm.sent


def grad_of(unit: Unit) -> Tensor:
    """Return the first elements of this rank's gradient."""
    assert unit.store is not None
    return unit.store.grad()[: NUMEL // 2]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_sum_of_passes_is_sent_in_32_bits(stage: int, passes: int) -> None:
    reducer, unit = make(stage)
    for _ in range(2):  # each step counts its passes
        values = [1.0, *[FINE] * (passes - 1)]
        wanted = torch.bfloat16 if passes == 1 else torch.float32
        assert run(reducer, unit, *values, stage=stage) == [wanted]
        assert grad_of(unit).eq(sum(values)).all(), "no digit is lost"
        reducer.clear()


def test_sums_at_stage_2_rest_in_32_bits() -> None:
    reducer, unit = make(2)
    assert run(reducer, unit, 1.0, FINE, stage=2) == [torch.bfloat16, torch.bfloat16]
    assert grad_of(unit).eq(1 + FINE).all()


def test_a_single_gradient_rests_in_16_bits_again_after_a_sum() -> None:
    reducer, unit = make(2, single=torch.bfloat16)
    for values, rest in (([1.0], torch.bfloat16), ([1.0, FINE], torch.float32), ([1.0], torch.bfloat16)):
        run(reducer, unit, *values, stage=2)
        assert unit.store is not None and unit.store.grad().dtype is rest
        assert grad_of(unit).eq(sum(values)).all()
        reducer.clear()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_only_gradient_rests_in_the_dtype_that_the_sum_over_the_ranks_has(stage: int) -> None:
    for native, rest in ((False, torch.float32), (True, torch.bfloat16)):
        reducer, unit = make(stage, keeps_reduced=True)
        unit.link._native_reduce_scatter = native  # as NCCL, which sums in the dtype that it sends
        run(reducer, unit, 1.0, stage=stage)
        assert unit.store is not None and unit.store.grad().dtype is rest
        reducer.clear()
        run(reducer, unit, 1.0, FINE, stage=stage)
        assert unit.store.grad().dtype is torch.float32
        assert grad_of(unit).eq(1 + FINE).all(), "no digit of a sum of passes is lost"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_value_that_a_script_writes_keeps_its_digits(stage: int) -> None:
    """Also beside the gradient of another pass in the same step."""
    reducer, unit = make(stage, keeps_reduced=True)
    unit.link._native_reduce_scatter = True
    assert unit.store is not None
    for value, rest in ((1.0, torch.bfloat16), (2.0, torch.bfloat16)):
        run(reducer, unit, value, stage=stage)
        assert grad_of(unit).eq(value).all() and (unit.store.grad().dtype is rest or stage < 2)
        reducer.widen(unit)
        assert grad_of(unit).eq(value).all()
        unit.store.grad().fill_(1 + FINE)
        unit.store.grad_changed()
        assert grad_of(unit).eq(1 + FINE).all()
        run(reducer, unit, value, stage=stage)
        assert grad_of(unit).eq(1 + FINE + value).all()
        reducer.clear()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_chosen_dtype_is_sent_whatever_the_number_of_passes(stage: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        reducer, unit = make(stage, dtype)
        assert set(run(reducer, unit, 1.0, 1.0, stage=stage)) == {dtype}
        assert grad_of(unit).eq(2).all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_divided_before_they_are_sent(stage: int) -> None:
    reducer, unit = make(stage, predivide=4.0)
    run(reducer, unit, 8.0, 8.0, stage=stage)
    assert grad_of(unit).eq(4).all()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_forgets_passes_that_have_not_been_sent(stage: int) -> None:
    reducer, unit = make(stage)
    reducer.sync = False
    reducer.begin()
    reducer.add(unit, 0, torch.ones(NUMEL, dtype=torch.bfloat16))
    reducer.finish()
    reducer.clear()
    assert isinstance(reducer.comm, Seen)
    reducer.reduce_rest()
    assert reducer.comm.sent == [] and unit.store is not None and not unit.store.has_grad
    assert run(reducer, unit, 3.0, stage=stage) == [torch.bfloat16], "one pass, of this step alone"
    assert grad_of(unit).eq(3).all()
