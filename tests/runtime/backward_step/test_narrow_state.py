"""Test the smallest memory: 8-bit state, stochastic masters and steps in the backward pass together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.zero.store import DeviceStore


def _train(stage: int) -> dict[str, Any]:
    join()
    found: dict[str, Any] = {}
    for stepping in (False, True):
        options = config(
            stage,
            4 // torch.distributed.get_world_size(),
            zero={"stage3_module_granularity_threshold": 0, "step_in_backward": stepping},
            optimizer={"type": "AdamW", "params": {"lr": 3e-3, "state_dtype": "int8"}},
            bf16={"enabled": True, "master_weights": "stochastic"},
        )
        engine, *_ = zlaunch.initialize(model=net(), config=options)
        losses = train_engine(engine, batches(6, 4))
        found[str(stepping)] = {name: each.clone() for name, each in engine.module.state_dict().items()}
        found[f"losses {stepping}"] = losses
        stores = [unit.store for unit in engine.units if isinstance(unit.store, DeviceStore)]
        found[f"kept {stepping}"] = any(store.grad_memory is not None for store in stores)
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 2)])
def test_when_a_unit_is_stepped_changes_no_bit(stage: int, world: int) -> None:
    for found in run_workers(_train, world, stage):
        assert found["losses True"] == found["losses False"]
        assert found["losses True"][-1] < found["losses True"][0]
        assert all(torch.equal(value, found["False"][name]) for name, value in found["True"].items())
        assert found["kept False"] and not found["kept True"]
