"""Test that counters in param groups survive steps, saves and loads; test ``maximize``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.models import relative_error
from tests.runtime.workers import join, run_workers

STEPS, SAVED = 6, 3
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "0": (False, {"stage": 0}),
    "3, maximize": (True, {"stage": 3}),
    "1, offloaded": (False, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
}
"""Whether to climb, and the section of ZeRO. Under stage 1 rank 0 has no part of the second group."""


class Averaging(torch.optim.Optimizer):
    """Counts steps in its groups and averages by the count, as schedule-free optimizers do; ``d`` grows by
    itself, as Prodigy's does.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, maximize: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "d": 1.0, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.25
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                sign = 1.0 if group["maximize"] else -1.0
                state["z"].add_(p.grad, alpha=sign * group["lr"] * group["d"])
                p.lerp_(state["z"], 1 / group["k"])


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "k": 4, "lr": 0.05}]


def small() -> Any:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def train(engine: Any, steps: list[torch.Tensor]) -> None:
    for x in steps:
        engine.backward(engine(x.chunk(2)[engine.global_rank]).square().mean())
        engine.step()


def counters(optimizer: torch.optim.Optimizer) -> list[tuple[int, float]]:
    return [(group["k"], group["d"]) for group in optimizer.param_groups]


def train_plain(maximize: bool) -> tuple[nn.Module, list[list[tuple[int, float]]]]:
    """Return a model that plain torch has trained, and the counters after each step."""
    plain = small()
    optimizer = Averaging(groups(plain), maximize=maximize)
    at = []
    for x in data():
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        at.append(counters(optimizer))
    return plain, at


def make_engine(maximize: bool, zero: dict[str, Any]) -> Any:
    model = small()
    small_blocks = {"stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**zero, **small_blocks},
    }
    optimizer = Averaging(groups(model), maximize=maximize)
    return zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]


def _follow(folder: str) -> dict[str, float]:
    """Train, save in the middle, and train on from there in another engine; compare both with plain torch."""
    join()
    found: dict[str, float] = {}
    for name, case in CASES.items():
        plain, at = train_plain(case[0])
        engine = make_engine(*case)
        for step, x in enumerate(data()):
            train(engine, [x])
            assert counters(engine.optimizer) == at[step], (name, step)
            if step + 1 == SAVED:
                engine.save_checkpoint(folder, tag=name)
        again = make_engine(*case)
        train(again, data()[:1])
        again.load_checkpoint(folder, tag=name)
        assert counters(again.optimizer) == at[SAVED - 1], name
        train(again, data()[SAVED:])
        assert counters(again.optimizer) == at[-1], name
        wanted = plain.state_dict()
        for each in (engine, again):
            state = each.module.state_dict()
            error = max(relative_error(state[key], wanted[key]) for key in wanted)
            found[name] = max(error, found.get(name, 0.0))
            each.destroy()
    _count_without_a_part()
    return found


def _count_without_a_part() -> None:
    """Step a model so small that rank 1 has no part of it."""
    model: Any = nn.Linear(6, 1, bias=False).double()
    optimizer = Averaging(model.parameters())
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]
    train(engine, data()[:2])
    assert counters(engine.optimizer) == [(2, 1.25**2)]
    engine.destroy()


@pytest.mark.rotated
def test_counters_in_groups_are_kept_through_steps_saves_and_loads(tmp_path: Path) -> None:
    for found in run_workers(_follow, 2, str(tmp_path)):
        assert {name: error for name, error in found.items() if not error <= 1e-9} == {}


def _maximize(folder: str) -> list[float]:
    """Climb under stage 3 in bf16 by torch's AdamW; return the first and last loss."""
    rank = join()
    model = small().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0, maximize=True)
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]
    losses = []
    x = data()[0].bfloat16().chunk(2)[rank]
    for _ in range(4):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(folder, tag="up")
    engine.destroy()
    down = small().float()
    other: Any = zlaunch.initialize(
        model=down, optimizer=torch.optim.AdamW(down.parameters(), lr=0.05), config=given
    )[0]
    try:
        other.load_checkpoint(folder, tag="up")
    except zlaunch.CheckpointError as error:
        assert "was saved with maximize True" in str(error)
    else:
        raise AssertionError("momentum that climbs was taken by an optimizer that descends")
    other.destroy()
    return losses


def test_maximize_climbs_and_does_not_resume_as_a_descent(tmp_path: Path) -> None:
    for losses in run_workers(_maximize, 2, str(tmp_path)):
        assert losses[-1] > 1.1 * losses[0]
