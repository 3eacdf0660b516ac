"""Test 1-bit Adam and 0/1 Adam beside the papers' formulas in a few steps, and momentum at a rate of 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.collective_step.models import error
from tests.runtime.one_bit.one_bit_reference import ReferenceOneBit
from tests.runtime.one_bit.test_one_bit import TOLERANCE, layouts_of
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.optim.sign_exchange import BYTES

STEPS = 11
KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 7, "var_update_scaler": 2, "local_step_clipper": 1},
}
COMMON = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}


class Small(nn.Module):
    """Two layers of odd sizes, each a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 19)
        self.last = nn.Linear(19, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def small() -> Small:
    torch.manual_seed(11)
    return Small().double()


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 7, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def make_engine(stage: int, kind: str, params: dict[str, Any]) -> Any:
    zero = {
        "stage": stage,
        "reduce_bucket_size": 100,
        "stage3_param_persistence_threshold": 0,
        "stage3_module_granularity_threshold": 0,
    }
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": kind, "params": params},
    }
    return zlaunch.initialize(model=small(), config=given)[0]


def _follow() -> dict[str, tuple[float, int]]:
    """Return the largest error of each kind and stage, and in how many steps signs were sent."""
    rank = join()
    found = {}
    for kind, own in KINDS.items():
        for stage in (0, 2):
            engine = make_engine(stage, kind, {**COMMON, **own})
            plain = small()
            options = {"kind": kind, **COMMON, **own}
            options.setdefault("freeze_step", own.get("var_freeze_step"))
            reference = ReferenceOneBit(plain, layouts_of(engine), engine.world_size, **options)
            moved = engine.comm.moved
            worst, signs = 0.0, 0
            for x in data():
                grads = []
                for part in x.chunk(2):
                    plain.zero_grad()
                    loss_of(plain, part).backward()
                    grads.append(
                        {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
                    )
                reference.step(grads)
                before = moved[BYTES]
                engine.backward(loss_of(engine, x.chunk(2)[rank]))
                engine.step()
                signs += moved[BYTES] != before
                worst = max(worst, error(engine, plain))
            found[f"{kind} {stage}"] = worst, signs
            engine.destroy()
    return found


@pytest.mark.rotated
def test_each_step_is_that_of_the_paper() -> None:
    for found in run_workers(_follow, 2):
        assert {name: worst for name, (worst, _) in found.items() if not worst <= TOLERANCE} == {}
        # dense are OneBitAdam's first 3 steps, and ZeroOneAdam's steps 1, 2, 4 and 6
        assert {name: signs for name, (_, signs) in found.items()} == {
            **{f"OneBitAdam {stage}": STEPS - 3 for stage in (0, 2)},
            **{f"ZeroOneAdam {stage}": STEPS - 4 for stage in (0, 2)},
        }


class Equal(nn.Module):
    """A weight whose elements have equal gradients, of which signs lose nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256, dtype=torch.float64))

    def forward(self, factor: float) -> Tensor:
        return (self.weight * factor).sum()


def _rest() -> list[tuple[float, float]]:
    """Make local steps with a rate of 0; return the momentum and the expected one after exchanges."""
    rank = join()
    params = {"lr": 1e-2, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "ZeroOneAdam", "params": params},
    }
    model = Equal()
    engine: Any = zlaunch.initialize(model=model, config=given)[0]
    group = engine.optimizer.param_groups[0]
    found = []
    wanted = 0.0
    for step in range(1, 13):
        group["lr"] = 0.0 if 4 < step <= 8 else 1e-2
        engine.backward(engine(3.0 if rank == 0 else 1.0))
        engine.step()
        wanted = 0.9 * wanted + 0.1 * 2.0
        if step in (2, 8):  # the last dense step, and the exchange after four steps that went nowhere
            moment = zlaunch.safe_get_full_optimizer_state(model.weight, "exp_avg")
            assert moment is not None
            assert bool((moment == moment[0]).all())
            found.append((float(moment[0]), wanted))
    engine.destroy()
    return found


def test_momentum_is_averaged_where_the_rate_is_0() -> None:
    first, second = run_workers(_rest, 2)
    assert first == second, "all ranks go on with the same momentum"
    for momentum, wanted in first:
        assert momentum == pytest.approx(wanted, rel=1e-6)
