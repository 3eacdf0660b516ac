"""Test modules that make parameters of other parameters while they are built in zlaunch.zero.Init."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import config, relative_error
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.errors import ParameterError

TOLERANCE = 1e-9
KINDS: dict[str, Callable[..., Any]] = {
    "hooks": nn.utils.weight_norm,
    "parametrizations": nn.utils.parametrizations.weight_norm,
}


class Normed(nn.Module):
    def __init__(self, kind: str, gathers: bool) -> None:
        super().__init__()
        norm = KINDS[kind]
        own: dict[str, Any] = {"dtype": torch.float64}
        self.up = norm(nn.Linear(32, 160, **own))
        self.conv: nn.Module = nn.Conv1d(16, 16, 3, padding=1, **own)
        if gathers:  # as Wav2Vec2 does
            with zlaunch.zero.GatheredParameters(self.conv.weight, modifier_rank=0):
                self.conv = norm(self.conv, name="weight", dim=2)
        else:
            self.conv = norm(self.conv, name="weight", dim=2)
        self.down = norm(nn.Linear(160, 32, **own))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x))) + self.conv(x.view(-1, 16, 2)).flatten(1)
        return y


def _built(kind: str, gathers: bool) -> Normed:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Normed(kind, gathers)


def _train(kind: str, gathers: bool) -> float:
    plain = _built(kind, False)
    with zlaunch.zero.Init():
        model = _built(kind, gathers)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    with zlaunch.zero.GatheredParameters(model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    engine, *_ = zlaunch.initialize(model=model, config=config(3, 2))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(2):
        x = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x.chunk(2)[engine.global_rank]).square().mean())
        engine.step()
    state, wanted = model.state_dict(), plain.state_dict()
    error = max(relative_error(state[name], wanted[name]) for name in wanted)
    weight = model.down.bias
    with pytest.raises(ParameterError, match=r"down\.bias is sharded"):
        nn.Parameter(weight)
    with zlaunch.zero.GatheredParameters(weight):
        copy = nn.Parameter(weight, requires_grad=False)
        assert type(copy) is nn.Parameter and copy.data_ptr() == weight.data_ptr() and not copy.requires_grad
    engine.destroy()
    return error


def _all() -> dict[str, float]:
    join()
    return {
        f"{kind}, gathers {gathers}": _train(kind, gathers) for kind in KINDS for gathers in (False, True)
    }


def test_weight_norm() -> None:
    for found in run_workers(_all, 2):
        assert {case: error for case, error in found.items() if not error <= TOLERANCE} == {}
