"""Test that steps inside the backward pass equal plain torch in float64, at stages 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.optim.lion import Lion

STEPS, SAMPLES = 6, 12
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": ({"lr": 3e-3, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)),
    "SGD": ({"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Lion": ({"lr": 1e-3}, lambda p: Lion(p, lr=1e-3)),
}


def settings(stage: int, clip: float = 0.0, kind: str = "AdamW", **zero: Any) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    section = {"type": kind, "params": OPTIMIZERS[kind][0]}
    own = {"step_in_backward": True, **zero}
    return config(stage, SAMPLES // world, clip=clip, zero=own, optimizer=section)


def engine_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    engine, *_ = zlaunch.initialize(model=model, config=settings(*args, **kwargs))
    assert not engine._method.steps_on_device
    return engine


def blocks_of(engine: Any, plain: nn.Module) -> list[list[Tensor]]:
    """The parameters of plain torch's model by the engine's units."""
    named = dict(plain.named_parameters())
    return [[named[name] for name in unit.names] for unit in engine.units]


def clip_as_documented(model: nn.Module, how: str, clip: float, norms: list[float], blocks: Any) -> None:
    parameters = list(model.parameters())
    norm = float(torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt())
    if how == "value" and clip:
        nn.utils.clip_grad_value_(parameters, clip)
    elif clip and norms:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, clip / (norms[-1] + 1e-6)))
    elif clip:
        for block in blocks:
            nn.utils.clip_grad_norm_(block, clip)
    norms.append(norm)


def error(engine: Any, plain: nn.Module) -> float:
    state = engine.module.state_dict()
    return max(relative_error(state[name], value) for name, value in plain.state_dict().items())


def _compare(cases: list[tuple[int, str, float, str]]) -> dict[str, float]:
    join()
    found = {}
    for stage, kind, clip, how in cases:
        engine = engine_of(net().double(), stage, clip, kind, step_in_backward_clipping=how)
        plain, norms = net().double(), list[float]()
        optimizer = OPTIMIZERS[kind][1](plain.parameters())
        worst = 0.0
        for batch in batches(STEPS, SAMPLES):
            loss_of(plain, batch).backward()
            clip_as_documented(plain, how, clip, norms, blocks_of(engine, plain))
            optimizer.step()
            optimizer.zero_grad()
            train_engine(engine, [batch])
            worst = max(worst, abs(engine.get_global_grad_norm() / norms[-1] - 1))
            assert all(unit.store.grad_memory is None for unit in engine.units)
        found[f"{stage} {kind} {clip} {how}"] = max(worst, error(engine, plain))
        engine.destroy()
    return found


CASES = [
    *((stage, kind, 0.0, "previous_norm") for stage in (2, 3) for kind in OPTIMIZERS),
    *((stage, kind, 0.3, "previous_norm") for stage in (2, 3) for kind in ("AdamW", "SGD")),
    *((stage, "SGD", 0.01, "value") for stage in (2, 3)),
]


@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_optimizer_and_clipping_equals_plain_torch(world: int) -> None:
    for found in run_workers(_compare, world, CASES):
        assert len(found) == len(CASES)
        assert {name: each for name, each in found.items() if not each <= 1e-9} == {}


@pytest.mark.rotated
def test_it_does_so_over_gloo() -> None:
    cases = [case for case in CASES if case[1] == "AdamW"]
    for found in run_workers(_compare, 2, cases, env={"ZLAUNCH_SHARED_MEMORY": "0"}):
        assert {name: each for name, each in found.items() if not each <= 1e-9} == {}
