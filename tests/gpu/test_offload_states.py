"""Test ``offload_states`` on a GPU: memory goes and comes, page-locked, and training is as without it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net

pytestmark = pytest.mark.gpu


def train(stage: int, section: str, moves: bool) -> tuple[list[float], dict[str, Any]]:
    zlaunch.init_distributed()
    gc.collect()
    others = torch.cuda.memory_allocated()
    options: dict[str, Any] = {"bf16": {"enabled": True}} if section == "bf16" else {}
    engine, *_ = zlaunch.initialize(model=net(width=256), config=config(stage, 6, **options))
    losses = []
    for turn, batch in enumerate(batches(6, 6)):
        if moves:
            non_blocking = turn % 2 == 1
            before = torch.cuda.memory_allocated()
            engine.offload_states(pin_memory=turn != 4, non_blocking=non_blocking)
            if turn:
                assert torch.cuda.memory_allocated() - others < (before - others) / 10
            room = torch.full((before // 4,), float("nan"), device="cuda")  # where the states have been
            engine.reload_states(non_blocking=non_blocking)
            del room
            assert torch.cuda.memory_allocated() <= before
        loss = loss_of(engine, batch.cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if moves:
        torch.cuda.synchronize()
        states: Any = engine._states
        link = states._links[True]
        link.reclaim()
        pool = link.pool.statistics()
        assert pool.pinned_bytes == pool.held_bytes > 0 == pool.lent_bytes
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("section", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_training_as_without(stage: int, section: str) -> None:
    losses, state = train(stage, section, False)
    moved_losses, moved_state = train(stage, section, True)
    assert moved_losses == pytest.approx(losses, rel=1e-4)
    assert all(torch.allclose(moved_state[name], state[name], rtol=1e-2, atol=1e-3) for name in state)
