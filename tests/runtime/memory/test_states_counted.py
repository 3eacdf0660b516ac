"""Test that the plan counts the states that an optimizer keeps, and proposes fewer bits where they help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.workers import join, run_workers
from tests.unit.memory.test_estimate import setting
from zlaunch.runtime.errors import MemoryPlanError
from zlaunch.runtime.memory.estimate import GIB, Amounts, Setting, check, narrowed, plan
from zlaunch.runtime.offload.manager import mean_state_count
from zlaunch.runtime.optim.registry import build_optimizer
from zlaunch.runtime.zero import placeholder

KINDS: dict[str, dict[str, Any]] = {
    **{
        kind: {}
        for kind in ("AdamW", "Lion", "Adagrad", "SGD", "Lamb", "Adafactor", "RMSprop", "OneBitAdam", "Muon")
    },
    "AdamW amsgrad": {"amsgrad": True},
    "SGD momentum": {"momentum": 0.9},
    "Lion int8": {"state_dtype": "int8"},
}


def _count(stage: int) -> dict[str, tuple[float, float]]:
    """The states of an element that the plan counts, and those that there are after a step."""
    join()
    found = {}
    for name, params in KINDS.items():
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48), nn.Linear(48, 64))
        given = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": name.split()[0], "params": {"lr": 1e-3, **params}},
            "zero_optimization": {"stage": stage},
        }
        groups = [{"params": list(model.parameters())}]
        optimizer = build_optimizer(name.split()[0], {"lr": 1e-3, **params}, groups, model)
        counted = mean_state_count(optimizer, torch.numel)
        engine: Any = zlaunch.initialize(model=model, config=given)[0]
        engine.backward(engine(torch.randint(0, 64, (2, 5))).square().mean())
        engine.step()
        kept = sum(
            value.numel()
            for state in engine._shard_step.optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() and not key.endswith("_scale")
        )
        ranks = engine.comm.exchange(kept)
        numel = sum(placeholder.shape_of(parameter).numel() for parameter in model.parameters())
        found[name] = counted, (sum(ranks) if stage else kept) / numel
        engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_plan_counts_what_there_is_after_a_step(stage: int) -> None:
    for found in run_workers(_count, 2, stage):
        for name, (counted, kept) in found.items():
            assert counted == pytest.approx(kept, rel=0.03), name  # padding has state, too


def advice(s: Setting, free: Amounts) -> str:
    with pytest.raises(MemoryPlanError) as caught:
        check(s, free)
    return str(caught.value)


def test_fewer_bits_are_proposed_where_the_optimizer_has_them() -> None:
    plain = setting(3)
    assert list(narrowed(plain)) == []
    able = replace(plain, can_narrow=True, is_bf16=True)
    (state, first), (both, second) = narrowed(able)
    assert state == {"optimizer": {"params": {"state_dtype": "int8"}}}
    assert both == {**state, "bf16": {"master_weights": "stochastic"}}
    sizes = [plan(each).total.device for each in (able, first, second)]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[0] / 2
    assert list(narrowed(replace(second, state_bytes=1.0))) == []
    tight = Amounts(device=10 * GIB, host=GIB)
    text = advice(replace(able, stage=1), tight)
    assert 'optimizer state: "optimizer": {"params": {"state_dtype": "int8"}}, "bf16": {"master' in text
    stepping = replace(setting(1), can_step_in_backward=True)
    assert '"stage": 2, "step_in_backward": true' in advice(stepping, Amounts(device=16 * GIB, host=GIB))
