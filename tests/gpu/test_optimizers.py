"""Test optimizers that ranks step together, and state in fewer bits, on one GPU."""

from __future__ import annotations

from typing import Any

import pytest

import zlaunch
from tests.runtime.models import batches, config, net, relative_error, train_engine, train_plain
from zlaunch.optim import Lamb

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 1e-2},
    "Lamb": {"lr": 3e-3},
    "Muon": {"lr": 2e-2, "adam_lr": 3e-3},
    "OneBitAdam": {"lr": 3e-3, "freeze_step": 8},
    "OneBitLamb": {"lr": 3e-3, "freeze_step": 8},
    "ZeroOneAdam": {
        "lr": 3e-3,
        "var_freeze_step": 8,
        "var_update_scaler": 4,
        "local_step_scaler": 4,
        "local_step_clipper": 1,
    },
}
HOST = {"offload_optimizer": {"device": "cpu"}}


STEPS = 12
"""Four after the 8 in which the optimizers with signs exchange whole gradients."""


def _losses(optimizer: dict[str, Any], stage: int, steps: int = STEPS, **more: Any) -> list[float]:
    zlaunch.init_distributed()
    settings = config(stage, 8, optimizer=optimizer, **{"bf16": {"enabled": True}, **more})
    engine, *_ = zlaunch.initialize(model=net(), config=settings)
    losses = train_engine(engine, batches(2, 8) * (steps // 2))
    engine.destroy()
    return losses


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (3, {}), (2, HOST)], ids=["0", "3", "2 host"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: str, stage: int, zero: dict[str, Any]) -> None:
    losses = _losses({"type": kind, "params": KINDS[kind]}, stage, zero=zero)
    assert losses[-1] < 0.95 * losses[0]


def test_the_loss_falls_in_local_steps() -> None:
    params = {**KINDS["ZeroOneAdam"], "local_step_clipper": 4}
    losses = _losses({"type": "ZeroOneAdam", "params": params}, 0, steps=20)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_fp32_lamb_equals_itself_outside_of_an_engine(stage: int) -> None:
    zlaunch.init_distributed()
    plain = net().cuda()
    data = [batch.cuda() for batch in batches(10, 4)]
    train_plain(plain, data, optimizer=Lamb(plain.parameters(), lr=3e-3))
    section = {"type": "Lamb", "params": {"lr": 3e-3}}
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 4, optimizer=section))
    train_engine(engine, data)
    state, wanted = engine.module.state_dict(), plain.state_dict()
    assert max(relative_error(state[name], wanted[name]) for name in wanted) <= 1e-4
    engine.destroy()


@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (3, {}), (2, HOST)], ids=["1", "3", "2 host"])
@pytest.mark.parametrize("masters", ["fp32", "stochastic"])
@pytest.mark.parametrize("state", ["bf16", "int8"])
def test_the_loss_falls_in_fewer_bits(state: str, masters: str, stage: int, zero: dict[str, Any]) -> None:
    section = {"type": "AdamW", "params": {"lr": 3e-3, "state_dtype": state}}
    precision = {"enabled": True, "master_weights": masters}
    losses = _losses(section, stage, zero=zero, bf16=precision)
    assert losses[-1] < 0.95 * losses[0]
