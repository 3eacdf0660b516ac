"""Test optimizers that begin with state, over parameters of unusual shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import config
from tests.runtime.pipeline_parallel.test_refusals import MICRO_BATCHES, Network, loss_fn, micro_batches
from tests.runtime.pipeline_parallel.test_refusals import config as pipeline_config
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.zero import placeholder

ADAGRAD: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": 0.25}


class Scaled(nn.Module):
    """A layer, a parameter without elements, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


DATA = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _train(kind: str, stage: int) -> list[Tensor]:
    rank, world = join(), torch.distributed.get_world_size()
    settings = config(stage, 12 // world, optimizer={"type": kind, "params": ADAGRAD})
    engine, *_ = zlaunch.initialize(model=Scaled().double(), config=settings)
    for x in DATA:
        loss = engine(x.chunk(world)[rank]).square().mean()
        engine.backward(loss)
        engine.step()
    return [value.clone() for value in engine.module.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 3])
def test_adagrad_trains_parameters_of_unusual_shapes(stage: int) -> None:
    model = Scaled().double()
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    for x in DATA:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for found in run_workers(_train, 2, "Adagrad", stage):
        for value, wanted in zip(found, model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)


def _with_pipeline() -> list[Tensor]:
    """Train where each rank has some of the layers, and nothing of the others' parameters."""
    join()
    optimizer: dict[str, Any] = {"type": "Adagrad", "params": ADAGRAD}
    given = pipeline_config(optimizer=optimizer, gradient_clipping=0.0)
    engine: Any = zlaunch.initialize(model=Network().double(), config=given)[0]
    data = iter(micro_batches())
    for _ in range(3):
        engine.train_batch(data, loss_fn)
    found = [value.clone() for value in engine.module.state_dict().values()]
    engine.destroy()
    return found


def test_adagrad_with_a_pipeline() -> None:
    model = Network().double()
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    data = iter(micro_batches())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            words, labels = next(data)
            (loss_fn(model(words), labels) / MICRO_BATCHES).backward()
        optimizer.step()
    for found in run_workers(_with_pipeline, 2):
        for value, wanted in zip(found, model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)


def _empty_placeholders() -> list[float]:
    """Return accumulators of a model built sharded, with placeholders like DeepSpeed's, without elements."""
    join()
    given = config(3, 2)
    placeholder.settings.empty_placeholders = True  # as zlaunch.compat.deepspeed sets it
    with zlaunch.zero.Init(config_dict_or_path=given):
        model = Scaled()
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]
    engine.optimizer.param_groups[0]["lr"] = 0.0
    engine.backward(0.0 * engine(torch.randn(2, 8)).sum())
    engine.step()
    found = zlaunch.safe_get_full_optimizer_state(model.layer.weight, "sum")
    assert found is not None
    return list(found.flatten().tolist())


def test_the_accumulator_of_placeholders_without_elements() -> None:
    for found in run_workers(_empty_placeholders, 2):
        assert found == [0.25] * 64
