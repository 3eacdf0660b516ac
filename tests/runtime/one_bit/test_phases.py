"""Test what decides about phases of 1-bit optimizers: counts and rates that a script changes, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.collective_step.models import data, make_engine, section, train
from tests.runtime.one_bit.test_local_steps import ADAM
from tests.runtime.workers import join, run_workers
from zlaunch.optim import OneBitAdam
from zlaunch.runtime.optim.sign_exchange import BYTES


class Equal(nn.Module):
    """A weight whose elements have equal gradients, of which signs lose nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, dtype=torch.float64))

    def forward(self, factor: float) -> Tensor:
        return (self.weight * factor).sum()


ONE_CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4},
}


def _momentum(kind: str, stage: int, **more: Any) -> float:
    """Return the largest relative error of the momentum in 14 steps, amid which more are to be dense."""
    rank = join()
    key = "var_freeze_step" if kind == "ZeroOneAdam" else "freeze_step"
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": kind, "params": {"lr": 1e-2, key: 3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        **more,
    }
    model = Equal()
    engine: Any = zlaunch.initialize(model=model, config=given)[0]
    optimizer = engine.optimizer
    wanted, worst = 0.0, 0.0
    for step in range(14):
        if step == 7:
            optimizer.param_groups[0]["freeze_step"] = 10
        beta1 = optimizer.param_groups[0]["betas"][0]
        gradient = 1.0 if step % 2 == 0 else 0.5
        engine.backward(engine(2 * gradient if rank == 0 else 0.0))
        engine.step()
        wanted = beta1 * wanted + (1 - beta1) * gradient * (2 / engine.world_size)
        found = zlaunch.safe_get_full_optimizer_state(model.weight, "exp_avg")
        worst = max(worst, float((found / wanted - 1).abs().max()))
    engine.destroy()
    return worst


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_momentum_follows_betas_of_a_schedule_and_dense_steps_after_signs(kind: str, stage: int) -> None:
    for worst in run_workers(_with_schedule, 2, kind, stage):
        assert worst < 1e-6  # scales are fp32


def _with_schedule(kind: str, stage: int) -> float:
    return _momentum(kind, stage, scheduler=ONE_CYCLE)


def _without_momentum() -> float:
    """Train with a beta1 of 0 in some steps among signs; return the momentum's largest relative error."""
    rank = join()
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 3}},
        "gradient_clipping": 0.0,
    }
    model = Equal()
    engine: Any = zlaunch.initialize(model=model, config=given)[0]
    wanted, worst = 0.0, 0.0
    for step in range(12):
        beta1 = 0.0 if step in (3, 6, 7) else 0.9
        engine.optimizer.param_groups[0]["betas"] = (beta1, 0.999)
        gradient = 1.0 + step
        engine.backward(engine(2 * gradient if rank == 0 else 0.0))
        engine.step()
        wanted = beta1 * wanted + (1 - beta1) * gradient
        found = zlaunch.safe_get_full_optimizer_state(model.weight, "exp_avg")
        assert found is not None
        worst = max(worst, float((found / wanted - 1).abs().max()))
    engine.destroy()
    return worst


def test_a_beta_of_0_among_signs() -> None:
    assert max(run_workers(_without_momentum, 2)) < 1e-6


def _groups() -> None:
    join()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for key, value in {"freeze_step": 100, "betas": (0.5, 0.9)}.items():
        groups: Any = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
        groups[1][key] = value
        with pytest.raises(zlaunch.OptimizerError, match=f"the same {key} in all groups"):
            zlaunch.initialize(
                model=model,
                optimizer=OneBitAdam(groups, freeze_step=2),
                config={"train_micro_batch_size_per_gpu": 1},
            )
    model[1].requires_grad_(False)
    engine: Any = zlaunch.initialize(
        model=model,
        optimizer=OneBitAdam(model[0].parameters(), freeze_step=4),
        config={"train_micro_batch_size_per_gpu": 1},
    )[0]
    optimizer = engine.optimizer

    def step() -> None:
        engine.backward(engine(torch.randn(1, 4)).square().mean())
        engine.step()

    step()
    model[1].requires_grad_(True)
    further: dict[str, Any] = {"params": list(model[1].parameters())}
    with pytest.raises(zlaunch.OptimizerError, match="the same betas in all groups"):
        optimizer.add_param_group({**further, "betas": (0.1, 0.5)})
    optimizer.add_param_group(further)
    for _ in range(5):
        step()
    assert [group["step_count"] for group in optimizer.param_groups] == [6, 6]
    optimizer.param_groups[1]["freeze_step"] = 9
    with pytest.raises(zlaunch.OptimizerError, match="the same freeze_step in all groups"):
        step()
    engine.destroy()


def test_groups_that_differ_in_their_phases_are_refused() -> None:
    run_workers(_groups, 1)


def _ended(change: str) -> bool:
    """End local steps amid an interval; tell whether ranks are equal from the next step on."""
    join()
    engine = make_engine(None, section(0), ADAM)
    train(engine, data()[:14])
    group = engine.optimizer.param_groups[0]
    changes = {"clipper": {"local_step_clipper": 1}, "freeze": {"freeze_step": 20}}
    group.update(changes.get(change, {"freeze_step": 20, "var_interval": 1}))
    moved = engine.comm.moved[BYTES]
    train(engine, data()[14:15])
    assert engine.comm.moved[BYTES] > moved
    weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    both = engine.comm.exchange(weights.tolist())
    engine.destroy()
    return bool(both[0] == both[1] and torch.isfinite(weights).all())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", ["clipper", "freeze", "dense"])
def test_local_steps_that_are_ended(change: str) -> None:
    assert run_workers(_ended, 2, change) == [True, True]


def _by_hand() -> None:
    join()
    engine = make_engine(None, section(3), {"type": "ZeroOneAdam", "params": {"var_freeze_step": 2}})
    train(engine, data()[:4])
    engine.optimizer.param_groups[0]["local_step_clipper"] = 4
    with pytest.raises(zlaunch.OptimizerError, match="local_step_clipper 4 needs whole weights"):
        train(engine, data()[4:5])
    engine.destroy()


def test_local_steps_that_are_begun_by_hand_need_stage_0() -> None:
    run_workers(_by_hand, 2)
