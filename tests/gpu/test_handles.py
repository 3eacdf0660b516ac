"""Test the script's handles on a GPU: outputs of unknown classes, views that outlive a unit, new weights."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Layer, config, relative_error

pytestmark = pytest.mark.gpu


class Odd(nn.Module):
    """Returns its result where no tensor is looked for, and a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Layer(128) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(4, 128))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return types.SimpleNamespace(y=x + self.shift[:1], view=self.shift[1:].detach())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unknown_outputs_and_views(stage: int) -> None:
    zlaunch.init_distributed()
    torch.manual_seed(0)
    plain, model = Odd().cuda(), Odd()
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    given = config(stage, 4, zero={"stage3_module_granularity_threshold": 0})
    engine, mine, *_ = zlaunch.initialize(model=model, config=given)
    assert mine is not None
    for _ in range(5):
        x = torch.randn(4, 128, device="cuda")
        plain(x).y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (3 * engine(x).y.sum()).backward()  # to be dropped
        mine.zero_grad()
        out = engine(x)
        engine.backward(out.y.square().mean())
        mine.step()
        assert out.view.isfinite().all()
    state, wanted = engine.module.state_dict(), plain.state_dict()
    assert max(relative_error(state[name], wanted[name]) for name in wanted) <= 1e-4
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_changes_in_place_reach_the_masters(stage: int) -> None:
    zlaunch.init_distributed()
    model = Odd()
    engine, *_ = zlaunch.initialize(model=model, config=config(stage, 4, bf16={"enabled": True}))
    weight = model.layers[0].up.weight
    weight.data.fill_(0.5)
    engine.backward(engine(torch.randn(4, 128, device="cuda").bfloat16()).y.float().square().mean())
    engine.step()
    assert (weight.detach().float() - 0.5).abs().max() <= 0.02
    engine.destroy()
