"""Compare a DeepSpeed script under the real DeepSpeed 0.19.8 (tests/data/side_by_side) and under zlaunch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.side_by_side_net import batch, net
from tests.e2e.helpers import run

HERE = Path(__file__).parent
RECORDED = HERE.parent / "data" / "side_by_side"


def rounding(world: int) -> float:
    """Measure how far fp32 trainings drift from double precision in the script's steps. They start within a
    rounding of each other: one of them alone may be near by luck, on some processors.
    """
    exact = _losses(net().double(), world)
    found = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        model = net()
        with torch.no_grad():
            for parameter in model.parameters():
                signs = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + signs * 2.0**-23)
        found += [abs(a - b) for a, b in zip(exact, _losses(model, world), strict=True)]
    return max(found)


def _losses(model: nn.Module, world: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses: list[float] = []
    for step in range(10):
        each = [model(batch(step, rank)) for rank in range(world)]
        losses += [loss.item() for loss in each]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(real: Any, ours: Any, tolerance: float, path: str = "") -> list[str]:
    if isinstance(real, dict):
        assert real.keys() == ours.keys(), path
        return [
            line for key in real for line in differences(real[key], ours[key], tolerance, f"{path}/{key}")
        ]
    if isinstance(real, list):
        assert len(real) == len(ours), path
        return [
            line
            for i, (a, b) in enumerate(zip(real, ours, strict=True))
            for line in differences(a, b, tolerance, f"{path}/{i}")
        ]
    if isinstance(real, float):
        return [f"{path}: {real} {ours}"] if abs(real - ours) > tolerance * max(1.0, abs(real)) else []
    return [f"{path}: {real} {ours}"] if real != ours else []


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_it_says_the_same(tmp_path: Path, world: int) -> None:
    """Losses, gradients, norms, masters, moments, rates and counters, at stages 0 to 3."""
    out = tmp_path / "out.json"
    script = str(HERE / "side_by_side.py")
    launch = run(tmp_path, "--num_gpus", str(world), "--no_local_rank", script, str(out))
    assert out.exists(), launch.err
    real = json.loads((RECORDED / f"deepspeed_{world}.json").read_text())
    assert set(real[0]) == {"0", "1", "2", "3"} and len(real) == world
    tolerance = 10 * rounding(world)
    assert tolerance < 1e-3 and differences(real, json.loads(out.read_text()), tolerance) == []
