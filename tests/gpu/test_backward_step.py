"""Test steps inside the backward pass on one GPU: the same numbers as plain torch, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", [2, 3])
def test_it_equals_plain_torch(stage: int) -> None:
    zlaunch.init_distributed()
    plain = net().cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    settings = config(
        stage, 4, clip=0.1, zero={"step_in_backward": True, "step_in_backward_clipping": "value"}
    )
    engine, *_ = zlaunch.initialize(model=net(), config=settings)
    for batch in batches(10, 4):
        tokens = batch.cuda()
        loss_of(plain, tokens).backward()
        torch.nn.utils.clip_grad_value_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    train_engine(engine, batches(10, 4))
    state, wanted = engine.module.state_dict(), plain.state_dict()
    assert max(relative_error(state[name], wanted[name]) for name in wanted) <= 1e-4
    engine.destroy()


def _peak_bytes(stage: int, stepping: bool) -> tuple[int, int]:
    settings: dict[str, Any] = {"bf16": {"enabled": True}, "zero": {"step_in_backward": stepping}}
    engine, *_ = zlaunch.initialize(
        model=net(width=256, depth=16), config=config(stage, 1, clip=1.0, **settings)
    )
    numel = sum(unit.numel for unit in engine.units)
    data = batches(4, 1)
    train_engine(engine, data[:3])
    torch.cuda.reset_peak_memory_stats()
    train_engine(engine, data[3:])
    peak = torch.cuda.max_memory_allocated()
    engine.destroy()
    return peak, numel


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_take_the_memory_of_few_units(stage: int) -> None:
    zlaunch.init_distributed()
    (whole, numel), (stepping, _) = _peak_bytes(stage, False), _peak_bytes(stage, True)
    assert whole - stepping >= 4 * numel * 3 // 4  # of 16 blocks, at most three in flight
