"""Test offload on a GPU: training as without it, page-locked memory, and steps that never wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine

pytestmark = pytest.mark.gpu


def train(stage: int, zero: dict[str, Any], **options: Any) -> tuple[list[float], Any, Any]:
    zlaunch.init_distributed()
    small = {"stage3_param_persistence_threshold": 0, "sub_group_size": 4096, **zero}
    engine, *_ = zlaunch.initialize(
        model=net(width=48), config=config(stage, 6, 2, 0.05, zero=small, **options)
    )
    losses = train_engine(engine, batches(8, 12))
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    statistics = engine._offload.link.pool.statistics() if engine._offload is not None else None
    engine.destroy()
    return losses, state, statistics


@pytest.mark.parametrize("section", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_training_as_without(stage: int, section: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bf16": {"enabled": True}} if section == "bf16" else {}
    wanted_losses, wanted, _ = train(stage, {}, **options)
    tolerance = 1e-4 if section == "fp32" else 3e-2
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    ways: list[dict[str, Any]] = [{"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": nvme}]
    if stage == 3:
        ways += [{**way, "offload_param": {"device": "cpu"}} for way in ways]
        ways.append({"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}})
    for zero in ways:
        losses, state, statistics = train(stage, zero, **options)
        assert losses == pytest.approx(wanted_losses, rel=tolerance)
        assert max(relative_error(state[name].float(), wanted[name].float()) for name in wanted) <= tolerance
        assert statistics.pinned_bytes == statistics.held_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_memory_beyond_the_budget_is_pageable_with_one_warning() -> None:
    from zlaunch.cuda_ops.pinned import PinnedPool

    pool = PinnedPool(pin=True, budget_bytes=1 << 20)
    first = pool.take(1 << 20)
    with pytest.warns(RuntimeWarning, match="budget") as caught:
        second, third = pool.take(1 << 20), pool.take(1 << 20)
    assert len(caught) == 1 and first.is_pinned() and not second.is_pinned()
    assert pool.statistics().pinned_bytes == 1 << 20
    for buffer in (first, second, third):
        pool.give_back(buffer)
    pool.trim()
    assert pool.statistics().held_bytes == 0


@pytest.mark.parametrize("section", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_never_waits_for_a_step(stage: int, section: str) -> None:
    zlaunch.init_distributed()
    options: dict[str, Any] = {} if section == "fp32" else {section: {"enabled": True}}
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 6, clip=0.1, **options))
    data = [batch.cuda() for batch in batches(6, 6)]
    for index, batch in enumerate(data):
        if index == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.backward(loss_of(engine, batch))
            engine.step()
        except RuntimeError:
            torch.cuda.set_sync_debug_mode("default")
            raise
    torch.cuda.set_sync_debug_mode("default")
    norm = engine.get_global_grad_norm()
    assert norm is not None and norm > 0
    engine.destroy()
