"""Test that what lies between the parameters of a unit is zero, wherever it is kept or sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.zero.layout import make_layout
from zlaunch.runtime.zero.reduce import GradientOptions, GradientReducer
from zlaunch.runtime.zero.unit import Unit


def make(stage: int) -> Unit:
    """Make a unit of two parameters with padding behind each."""
    return Unit(
        "u",
        ["a", "b"],
        [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))],
        make_layout([5, 7], [0, 0], 2),
        FakeComm(),
        dtype=torch.float32,
        shard_optimizer=stage > 0,
        shard_params=stage == 3,
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_values_are_padded_with_zeros(stage: int) -> None:
    unit = make(stage)
    unit.wait_unsharded()
    gaps = unit.layout.gaps()
    assert gaps
    for start, stop in gaps:
        assert unit.full[start:stop].eq(0).all()
    assert unit.store is not None and unit.store.master is not None
    assert unit.store.master.sum() == unit.full[unit.start : unit.stop].sum()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("synced", [[True], [False, True], [True, True]])
def test_gradients_are_padded_with_zeros(stage: int, synced: list[bool]) -> None:
    unit = make(stage)
    reducer = GradientReducer([unit], unit.comm, GradientOptions(transient=stage > 1, dtype=None))
    reducer._agreed = True  # the fake has no other rank's order
    for _ in range(2):
        for sync in synced:
            reducer.sync = sync or stage > 1
            reducer.begin()
            for index, shape in enumerate(unit.shapes):
                reducer.add(unit, index, torch.ones(shape))
            reducer.finish()
        assert unit.store is not None
        grad = unit.store.grad()
        own = sum(high - low for _, low, high in unit.layout.overlaps(unit.start, unit.stop))
        assert grad.sum() == own * len(synced)
        reducer.clear()
