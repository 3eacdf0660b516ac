"""Test modules without parameters that are replaced, added and removed while an engine trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.handles.test_optimizer import TOLERANCE, options, worst
from tests.runtime.models import batches, loss_of
from tests.runtime.workers import join, run_workers


class Replaceable(nn.Module):
    """Has modules without parameters: alone, among others and in a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(31, 8)
        self.layers: Any = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Identity())) for _ in range(2)
        )
        self.activation: nn.Module = nn.Dropout(0.0)
        self.head = nn.Linear(8, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(self.activation(hidden))
        return logits


def change(model: Replaceable, step: int) -> None:
    """Replace modules before a step."""
    if step == 1:
        model.activation = nn.Tanh()
        model.layers[0][1] = nn.Sequential(nn.ReLU(), nn.SiLU())
    if step == 2:
        model.layers[1][1][0] = nn.ReLU()
        model.layers[0].append(nn.Tanh())
    if step == 3:
        del model.layers[0][2]
        model.add_module("unused", nn.Dropout())


def _replaced() -> dict[int, float]:
    rank = join()
    found = {}
    for stage in (0, 2, 3):
        plain, model = Replaceable().double(), Replaceable().double()
        theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3)
        mine = torch.optim.AdamW(model.parameters(), lr=3e-3)
        engine: Any = zlaunch.initialize(model=model, optimizer=mine, config=options(stage))[0]
        for step, batch in enumerate(batches(5, 4)):
            change(plain, step)
            change(model, step)
            loss_of(plain, batch).backward()
            theirs.step()
            theirs.zero_grad()
            engine.backward(loss_of(engine, batch.chunk(2)[rank]))
            engine.step()
        found[stage] = worst(model, plain)
        _refused(engine, model, batches(1, 4)[0].chunk(2)[rank])
        engine.destroy()
    return found


def _refused(engine: Any, model: Replaceable, batch: Tensor) -> None:
    """Replace modules by, or in place of, modules with parameters or buffers."""
    empty, layer = model.activation, model.layers[1]
    with_buffer = nn.Identity()
    with_buffer.register_buffer("count", torch.zeros(1))
    inner: Any = model.layers[0][1]  # replaced once already: it is watched as those from the start
    for where, name, value, said in (
        (model, "activation", nn.PReLU(), "activation was replaced or added"),
        (model, "activation", nn.Sequential(nn.Linear(31, 31)), "activation was replaced or added"),
        (model, "activation", with_buffer, "activation was replaced or added"),
        (model.layers, "1", nn.GELU(), "layers lost parameters"),
        (inner, "1", nn.PReLU(), r"layers\.0\.1\.1 was replaced or added"),
        (inner[0], "late", nn.PReLU(), r"layers\.0\.1\.0\.late was replaced or added"),
    ):
        former = where._modules.get(name)
        where.add_module(name, value) if former is None else where._modules.update({name: value})
        with pytest.raises(zlaunch.ParameterError, match=said):
            engine.save_checkpoint("never")
        where._modules.update({name: former}) if former is not None else where._modules.pop(name)
    assert model.activation is empty and model.layers[1] is layer
    engine.backward(loss_of(engine, batch))
    engine.step()


def test_modules_without_parameters_may_be_replaced() -> None:
    for found in run_workers(_replaced, 2):
        assert {stage: error for stage, error in found.items() if not error <= TOLERANCE} == {}
