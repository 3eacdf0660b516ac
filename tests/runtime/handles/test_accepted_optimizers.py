"""Test optimizers that look at more than one element: right where whole tensors exist, refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.handles.test_optimizer import TOLERANCE, options, worst
from tests.runtime.models import batches, config, loss_of, net, train_engine
from tests.runtime.workers import join, run_workers


class Lamb(torch.optim.Optimizer):
    """A trust ratio for each parameter: norms of whole tensors."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                    update = state["m"] / (state["m"].abs() + 1e-3)
                    p.sub_(group["lr"] * p.norm() / (update.norm() + 1e-6) * update)


class Estimating(torch.optim.Optimizer):
    """A rate from a sum over all parameters, as Prodigy has it."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        total = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        group["d"] = max(group["d"], total)
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"] / group["d"])


class Shampoo(torch.optim.Adafactor):
    """Is known by its name to need whole tensors."""


MAKERS: dict[str, Any] = {
    "Lamb": Lamb,
    "Estimating": Estimating,
    "Shampoo": lambda p: Shampoo(p, lr=1e-2),
}


def _train(folder: str) -> dict[str, float]:
    rank = join()
    world = torch.distributed.get_world_size()
    found = {}
    for name, make in MAKERS.items():
        for stage in (0,) if world > 1 else (0, 1, 3):
            plain, model = net().double(), net().double()
            theirs = make(plain.parameters())
            given = {**options(stage), "train_micro_batch_size_per_gpu": 4 // world}
            engine, mine, *_ = zlaunch.initialize(model=model, optimizer=make, config=given)
            for step, batch in enumerate(batches(6, 4)):
                loss_of(plain, batch).backward()
                theirs.step()
                theirs.zero_grad()
                engine.backward(loss_of(engine, batch.chunk(world)[rank]))
                engine.step()
                if step == 3:
                    engine.save_checkpoint(folder, tag=f"{name}{stage}")
            found[f"{name} {stage}"] = worst(model, plain)
            if name == "Estimating":
                assert mine is not None
                assert mine.param_groups[0]["d"] == pytest.approx(theirs.param_groups[0]["d"], rel=1e-9)
            again, *_ = zlaunch.initialize(model=net().double(), optimizer=make, config=given)
            again.load_checkpoint(folder, tag=f"{name}{stage}")
            for batch in batches(6, 4)[4:]:
                again.backward(loss_of(again, batch.chunk(world)[rank]))
                again.step()
            found[f"{name} {stage} resumed"] = worst(again.module, plain)
            again.destroy()
            engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_whole_tensors_where_they_exist(world: int, tmp_path: Path) -> None:
    for found in run_workers(_train, world, str(tmp_path)):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def _refused(folder: str) -> None:
    zlaunch.init_distributed()
    for stage in (1, 2, 3):
        with pytest.raises(zlaunch.OptimizerError, match="Shampoo needs whole tensors"):
            zlaunch.initialize(model=net(), optimizer=MAKERS["Shampoo"], config=options(stage))
        with pytest.raises(
            zlaunch.OptimizerError, match=r"which is not zlaunch\.runtime\.optim\.lamb\.Lamb, needs whole"
        ):
            zlaunch.initialize(model=net(), optimizer=Lamb, config=options(stage))
        with pytest.raises(zlaunch.OptimizerError, match="whether optimizer Estimating is element-wise"):
            zlaunch.initialize(model=net(), optimizer=Estimating, config=options(stage))
        given = {**options(stage), "zero_allow_untested_optimizer": True}
        engine, *_ = zlaunch.initialize(model=net(), optimizer=Estimating, config=given)
        train_engine(engine, batches(2, 4))
        engine.destroy()
    with pytest.raises(zlaunch.OptimizerError, match="LBFGS is not supported"):
        zlaunch.initialize(model=net(), optimizer=lambda p: torch.optim.LBFGS(p), config=options(0))
    given = options(0)
    given["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    given["zero_optimization"]["stage"] = 1
    with pytest.raises(zlaunch.OptimizerError, match="whether optimizer Estimating is element-wise"):
        zlaunch.initialize(model=net(), optimizer=Estimating, config=given)


def test_flat_shards_are_refused_unless_the_config_allows_them(tmp_path: Path) -> None:
    run_workers(_refused, 2, str(tmp_path))


class DecayingAll(torch.optim.SGD):
    """Changes parameters without a gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def _decay(stage: int) -> None:
    model = net()
    unused = torch.nn.Parameter(torch.ones(40))
    model.register_parameter("unused", unused)
    optimizer = DecayingAll(model.parameters(), lr=0.1)
    settings = config(stage, 2, bf16={"enabled": True}, zero_allow_untested_optimizer=True)
    settings.pop("optimizer")
    engine, *_ = zlaunch.initialize(model=model, optimizer=optimizer, config=settings)
    for batch in batches(2, 2):
        engine.backward(loss_of(engine, batch))
        engine.step()
    master = zlaunch.safe_get_full_fp32_param(unused)
    with zlaunch.zero.GatheredParameters([unused]):
        torch.testing.assert_close(unused.float(), master, rtol=0, atol=0)
    assert master is not None and master.eq(0.25).all()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_changes_parameters_without_a_gradient(stage: int) -> None:
    run_workers(_decay, 2, stage)
