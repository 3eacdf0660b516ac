"""Test optimizers that begin with state, over parameters of unusual shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import config
from tests.runtime.workers import join, run_workers


class Scaled(nn.Module):
    """A layer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


DATA = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _train(kind: str, stage: int) -> list[Tensor]:
    rank, world = join(), torch.distributed.get_world_size()
    settings = config(stage, 12 // world, optimizer={"type": kind, "params": {"lr": 0.1}})
    engine, *_ = zlaunch.initialize(model=Scaled().double(), config=settings)
    for x in DATA:
        loss = engine(x.chunk(world)[rank]).square().mean()
        engine.backward(loss)
        engine.step()
    return [value.clone() for value in engine.module.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 3])
def test_adagrad_trains_a_parameter_without_dimensions(stage: int) -> None:
    model = Scaled().double()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for x in DATA:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for found in run_workers(_train, 2, "Adagrad", stage):
        for value, wanted in zip(found, model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)
