"""Test that whole parameters and outputs which come to differ on ranks that share layers are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zlaunch
from tests.runtime.workers import join, run_workers

PLAN = {"up": "colwise", "down": "rowwise"}


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = self.act(hidden) if self.kind == "summed" else torch.tanh(hidden)
        if self.kind == "a weight elsewhere":
            return x + functional.linear(hidden, self.up.weight.t())
        if self.kind == "softmax":
            return x + self.down(torch.softmax(hidden, -1))
        if self.kind == "mean":
            return x + self.down(hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1))
        if self.kind == "chunk":
            gate, up = hidden.chunk(2, dim=-1)
            return x + self.down(torch.cat([gate * up, up], -1))
        if self.kind == "cross_entropy":
            return functional.cross_entropy(hidden.view(-1, hidden.shape[-1]), torch.full((8,), 7))
        if self.kind == "__getitem__":
            return x + self.down(torch.cat([hidden[..., :2]] * 2, -1))
        if self.kind == "over the batch":
            return x + self.down(hidden - hidden.mean(0) + torch.softmax(hidden, 0))
        if self.kind == "a norm":
            return x + self.down(hidden) + 0.001 * self.up.weight.norm()
        if self.kind == "values in place":
            self.up.weight.data.clamp_(-0.1, 0.1)
        if self.kind == "a value":
            return x + self.down(hidden) * self.up.bias.sum().item() * self.up.bias[:1].detach()
        if self.kind == "parts at the end":
            return x.repeat(1, hidden.shape[1] // x.shape[1]) + hidden
        found: Tensor = x + self.down(hidden)
        if self.kind == "random":
            found = functional.dropout(found, 0.5, self.training)
        return found


def _train(kind: str, stage: int) -> str:
    rank = join()
    plan = {**PLAN, "act": "replicated_with_grad_allreduce"} if kind == "summed" else PLAN
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2, "plan": plan},
    }
    torch.manual_seed(3)
    engine, *_ = zlaunch.initialize(model=_Model(kind), config=config)
    torch.manual_seed(rank)
    try:
        for step in range(13):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            found = engine(x)
            engine.backward((found - x.flip(1).repeat(1, found.shape[1] // 4)).square().mean())
            engine.step()
            if kind == "loaded" and step == 2:
                state = engine.module.state_dict()
                engine.module.load_state_dict({**state, "down.bias": state["down.bias"] + rank})
    except RuntimeError as error:  # the other rank may have ended by then
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "stage", "name"),
    [
        ("loaded", 1, "down.bias"),
        ("loaded", 3, "act.weight|down.bias"),
        ("summed", 3, ""),
    ],
)
def test_what_comes_to_differ_is_named(kind: str, stage: int, name: str) -> None:
    found = run_workers(_train, 2, kind, stage)
    if not name:
        assert found == ["", ""]
        return
    assert any(
        f"{each} is replicated in the tensor-parallel group but now differs" in said
        for said in found
        for each in name.split("|")
    ), found


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["parts at the end", "random"])
def test_other_outputs_are_found(kind: str, stage: int) -> None:
    for said in run_workers(_train, 2, kind, stage):
        assert said.startswith("the model's outputs differ on ranks 0 to 1, a tensor-parallel group"), said


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("kind", "operation"),
    [("a weight elsewhere", "t"), ("a norm", "norm"), ("values in place", "data"), ("a value", "sum")],
)
def test_uses_of_a_part_as_if_it_were_whole_are_refused(kind: str, operation: str, stage: int) -> None:
    for said in run_workers(_train, 2, kind, stage):
        assert said.startswith(f"tensor parallelism: {operation} uses up."), said


@pytest.mark.parametrize("operation", ["softmax", "mean", "chunk", "__getitem__", "cross_entropy"])
def test_operations_along_the_outputs_that_are_cut_are_refused(operation: str) -> None:
    for said in run_workers(_train, 2, operation, 1):
        assert said.startswith(f"tensor parallelism: {operation} computes along the outputs of up"), said


def test_operations_along_others_are_not() -> None:
    assert run_workers(_train, 2, "over the batch", 1) == ["", ""]
