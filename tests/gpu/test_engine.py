"""Test the engine on one GPU: every stage trains like plain torch there, and leaves as much memory behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine, train_plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_equals_plain_torch(stage: int) -> None:
    zlaunch.init_distributed()
    plain = net().cuda()
    train_plain(plain, [batch.cuda() for batch in batches(10, 4)], clip=0.5)
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 4, clip=0.5))
    train_engine(engine, batches(10, 4))
    state, wanted = engine.module.state_dict(), plain.state_dict()
    assert max(relative_error(state[name], wanted[name]) for name in wanted) <= 1e-4
    engine.destroy()


@pytest.mark.parametrize("section", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bit_loss_falls(stage: int, section: str) -> None:
    zlaunch.init_distributed()
    settings: dict[str, Any] = {section: {"enabled": True}}
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 8, **settings))
    losses = train_engine(engine, batches(2, 8) * 8)
    assert losses[-1] < 0.9 * losses[0]
    engine.destroy()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_equals_plain_torch_under_it(stage: int, kind: torch.dtype) -> None:
    zlaunch.init_distributed()
    plain = net().cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler(enabled=kind is torch.float16)
    section = {"torch_autocast": {"enabled": True, "dtype": str(kind)}}
    extra: dict[str, Any] = {**section, "activation_checkpointing": {"enabled": True}}
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 4, **extra))
    losses = []
    for batch in batches(5, 4):
        tokens = batch.cuda()
        with torch.autocast("cuda", kind):
            loss = loss_of(plain, tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mine = loss_of(engine, tokens)
        engine.backward(mine)
        engine.step()
        losses.append((mine.item(), loss.item()))
    assert all(abs(mine - wanted) < 1e-2 * wanted for mine, wanted in losses), losses
    assert engine.skipped_steps == 0 and {p.dtype for p in engine.module.parameters()} == {torch.float32}
    engine.destroy()


@pytest.mark.parametrize("enabled", [True, False])
def test_tf32_rounds_products_or_not(enabled: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 before compute capability 8.0")
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(0, 4, tf32=enabled))
    a, b = torch.rand(2, 512, 512, dtype=torch.float64).cuda()
    error = ((a.float() @ b.float()).double() / (a @ b) - 1).abs().max().item()
    assert (error > 2e-5) == enabled, error
    engine.destroy()


def test_sharded_parameters_give_their_memory_back() -> None:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(width=256, depth=8), config=config(3, 4))
    train_engine(engine, batches(3, 4))
    assert sum(unit.full.untyped_storage().nbytes() for unit in engine.units) == 0
    engine.destroy()


UNFINISHED = """
import torch, zlaunch, torch.distributed as dist
zlaunch.init_distributed()
work = dist.all_reduce(torch.ones(1000, device="cuda"), async_op=True)
raise ValueError("this rank gives up")
"""


def test_nccl_is_aborted_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNFINISHED)
    env = {**os.environ, "PYTHONPATH": str(Path(zlaunch.__file__).parents[1])}
    command = [sys.executable, "train.py"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stderr  # not -6: no thread of NCCL's is left when the interpreter ends
    assert "ValueError: this rank gives up" in run.stderr
