"""Test that whole parameters used with parts of activations have whole gradients, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.workers import join, run_workers

PLAN = {"up": "colwise", "down": "rowwise"}
STEPS, TOLERANCE = 3, 1e-12


class _Model(nn.Module):
    """Has a PReLU, learned scales and a norm of heads between two layers that are cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.act = nn.PReLU()
        self.scale, self.log_scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(()))
        self.heads = nn.LayerNorm(2)

    def _inside(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x)) * self.scale
        if self.kind == "gated":
            hidden = hidden * x.mean(-1, keepdim=True)
        if self.kind == "both":
            x = x * self.scale
        hidden = hidden * self.log_scale.exp().to(hidden.dtype)
        hidden = self.heads(hidden.unflatten(-1, (-1, 2))).flatten(-2)
        found: Tensor = x + self.down(hidden)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        if self.kind == "recomputed":
            found: Tensor = checkpoint(self._inside, x, use_reentrant=False)
            return found
        return self._inside(x)


def _loss(model: Any, step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    found: Tensor = (model(x) - x.flip(1)).square().mean()
    return found


def _engine(kind: str, stage: int) -> Any:
    torch.manual_seed(3)
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "gradient_clipping": 0,
        # so that values hardly differ, whatever happens
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2, "plan": PLAN},
    }
    return zlaunch.initialize(model=_Model(kind).double(), config=config)[0]


def _errors() -> list[float]:
    join()
    found = []
    for kind, stage in (("plain", 0), ("plain", 3), ("recomputed", 1)):
        engine = _engine(kind, stage)
        torch.manual_seed(3)
        plain = _Model(kind).double()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
        for step in range(STEPS):
            engine.backward(_loss(engine, step))
            engine.step()
            _loss(plain, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = engine.module.state_dict()
        wanted = plain.state_dict()
        found.append(max((states[name] - value).abs().max().item() for name, value in wanted.items()))
        engine.destroy()
    return found


def test_their_gradients_are_those_of_one_process() -> None:
    for found in run_workers(_errors, 2):
        assert max(found) <= TOLERANCE, found


def _said(kind: str) -> str:
    join()
    try:
        engine = _engine(kind, 1)
        _loss(engine, 0)
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("both", "scale is used with a sharded activation (mul) and with a replicated one (mul)"),
        ("gated", "mul combines a sharded activation with a replicated one, [8, 1]"),
    ],
)
def test_other_uses_are_refused_in_the_first_pass(kind: str, text: str) -> None:
    for said in run_workers(_said, 2, kind):
        assert text in said and "colwise_gather_output" in said, said
