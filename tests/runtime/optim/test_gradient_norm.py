"""Test the norm that clipping divides by, with an optimizer that a wrong factor would show in."""

from __future__ import annotations

from typing import Any

import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine
from tests.runtime.workers import run_workers

CLIP = 0.05
TOLERANCE = 1e-9


def _errors() -> dict[str, float]:
    """Relative errors of the norm and of the values after a step of SGD: Adam would hide a factor."""
    zlaunch.init_distributed()
    (batch,) = batches(1, 12)
    plain = net().double()
    loss_of(plain, batch).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
    assert norm > 2 * CLIP
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    wanted = plain.state_dict()
    found = {}
    sgd: dict[str, Any] = {"type": "SGD", "params": {"lr": 1.0}}
    for stage in range(4):
        model = net().double()
        engine, *_ = zlaunch.initialize(model=model, config=config(stage, 6, 1, CLIP, optimizer=sgd))
        train_engine(engine, [batch])
        state = engine.module.state_dict()
        found[f"stage {stage} norm"] = abs((engine.get_global_grad_norm() or 0.0) / norm - 1)
        found[f"stage {stage} values"] = max(relative_error(state[name], wanted[name]) for name in wanted)
        engine.destroy()
    return found


def test_the_norm_is_that_of_plain_torch_at_every_stage() -> None:
    for found in run_workers(_errors, 2):
        assert len(found) == 8
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}
