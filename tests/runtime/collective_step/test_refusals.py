"""Test that ranks refuse a step together, also where one rank alone has the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.collective_step.models import data, make_engine, section, train
from tests.runtime.one_bit.test_local_steps import ADAM
from tests.runtime.workers import join, run_workers
from zlaunch.compat.fp32_access import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_optimizer_state,
)
from zlaunch.optim import Muon


class Scaled(nn.Module):
    """A matrix and a vector, which one rank of two has all of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.scale = nn.Linear(16, 16, bias=False), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def _muon() -> int:
    """Give Muon a vector; return how many of its elements this rank has."""
    join()
    model = Scaled()
    groups: Any = [{"params": [model.layer.weight]}, {"params": [model.scale], "use_muon": False}]
    given = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": section(2)}
    optimizer = Muon(groups, lr=1e-2)
    engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]
    x = torch.randn(4, 16)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    step()
    optimizer.param_groups[1]["use_muon"] = True
    with pytest.raises(zlaunch.OptimizerError, match=r"scale has the shape \[16\]"):
        step()
    optimizer.param_groups[1]["use_muon"] = False
    before = model.scale.detach().clone()
    step()
    assert not torch.equal(before, model.scale), "a refused step changes nothing, and others follow"
    part = safe_get_local_fp32_param(model.scale)
    engine.destroy()
    return 0 if part is None else part.numel()


def test_every_rank_refuses_a_vector_of_muon() -> None:
    assert sorted(run_workers(_muon, 2)) == [0, 16]


def _local() -> None:
    """Change a weight on one rank amid local steps."""
    rank = join()
    engine = make_engine(None, section(0), ADAM)
    train(engine, data()[:17])
    if rank == 1:
        with torch.no_grad():
            engine.module.head.bias.add_(1.0)
    with pytest.raises(zlaunch.OptimizerError, match=r"script changed head\.bias, its variance or eps"):
        train(engine, data()[17:18])
    engine.destroy()


def test_every_rank_refuses_a_write_amid_local_steps() -> None:
    run_workers(_local, 2)


def _state_of_one_rank() -> list[float]:
    """Set a momentum that one rank has all of, amid signs of momentum; return the weights later."""
    join()
    engine = make_engine(None, section(3), {"type": "OneBitAdam", "params": {"freeze_step": 2}})
    train(engine, data()[:4])
    weight = engine.module.head.weight
    part = safe_get_local_optimizer_state(weight, "exp_avg")
    assert part is not None
    if part.numel():
        safe_set_local_optimizer_state(weight, torch.zeros_like(part), "exp_avg")
    train(engine, data()[4:6])
    found = engine.module.state_dict()["head.weight"].flatten().tolist()
    engine.destroy()
    return list(found)


def test_state_that_one_rank_replaces_is_known_to_all() -> None:
    first, second = run_workers(_state_of_one_rank, 2)
    assert first == second
