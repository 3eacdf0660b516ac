"""Test Adam without bias correction under an engine, at every stage and offloaded, by the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, train_engine
from tests.runtime.workers import run_workers

LR, BETAS, EPS, DECAY = 3e-3, (0.8, 0.9), 1e-6, 0.1
STEPS = 3


def _formula(model: nn.Module, data: list[Tensor], *, decoupled: bool) -> None:
    """DeepSpeed's multi_tensor_adam with both corrections 1."""
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    for batch in data:
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter, (first, second) in zip(model.parameters(), moments, strict=True):
                assert parameter.grad is not None
                grad = parameter.grad + (0 if decoupled else DECAY * parameter)
                first.mul_(BETAS[0]).add_((1 - BETAS[0]) * grad)
                second.mul_(BETAS[1]).add_((1 - BETAS[1]) * grad * grad)
                update = first / (second.sqrt() + EPS) + (DECAY * parameter if decoupled else 0)
                parameter.sub_(LR * update)
                parameter.grad = None


def _error(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The largest error, as a part of the largest change."""
    change = max(float((wanted[name] - start[name]).abs().max()) for name in wanted)
    return max(float((found[name].double() - wanted[name]).abs().max()) for name in wanted) / change


def _errors(folder: str) -> dict[str, float]:
    zlaunch.init_distributed()
    data = batches(STEPS, 8)
    start = net().double().state_dict()
    wanted = {}
    for decoupled in (True, False):
        plain = net().double()
        _formula(plain, data, decoupled=decoupled)
        wanted[decoupled] = plain.state_dict()
    cpu = {"offload_optimizer": {"device": "cpu"}}
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    cases: list[tuple[str, int, torch.dtype, bool, dict[str, Any]]] = [
        *((f"stage {stage}", stage, torch.float64, True, {}) for stage in range(4)),
        ("L2", 1, torch.float64, False, {}),
        ("fp32", 2, torch.float32, True, {}),
        ("offloaded", 2, torch.float32, True, cpu),
        ("on disk", 3, torch.float32, False, nvme),
    ]
    found = {}
    for name, stage, dtype, decoupled, zero in cases:
        params = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
        section = {"type": "Adam", "params": {**params, "adam_w_mode": decoupled}}
        given = config(stage, 4, optimizer=section, zero=zero)
        engine, *_ = zlaunch.initialize(model=net().to(dtype), config=given)
        train_engine(engine, data[:2])
        engine.save_checkpoint(folder, tag="two")
        engine.destroy()
        engine, *_ = zlaunch.initialize(model=net().to(dtype), config=given)
        engine.load_checkpoint(folder, tag="two")
        train_engine(engine, data[2:])
        state = {key: value.clone() for key, value in engine.module.state_dict().items()}
        found[name] = _error(state, wanted[decoupled], start)
        engine.destroy()
    return found


@pytest.mark.exhaustive
def test_the_formula_holds_at_every_stage_and_offloaded(tmp_path: Any) -> None:
    """The optimizer's state survives a checkpoint, too."""
    for found in run_workers(_errors, 2, str(tmp_path)):
        assert len(found) == 8
        exact = {name: found.pop(name) for name in [*(f"stage {stage}" for stage in range(4)), "L2"]}
        assert {name: error for name, error in exact.items() if not error < 1e-9} == {}
        assert {name: error for name, error in found.items() if not error < 1e-3} == {}
