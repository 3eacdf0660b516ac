"""Test 1-bit optimizers beside the papers' formulas, and what they send."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.runtime.collective_step.models import (
    data,
    error,
    loss_of,
    make_engine,
    odd,
    offloads,
    section,
    train,
)
from tests.runtime.collective_step.one_bit_reference import ReferenceOneBit
from tests.runtime.workers import join, run_workers

KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4, "freeze_step": 6},
    "OneBitLamb": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4, "freeze_step": 6},
    "ZeroOneAdam": {"lr": 3e-3, "eps": 1e-4, "var_freeze_step": 13, "var_update_scaler": 3},
}
TOLERANCE = 1e-6
"""A scale is rounded to fp32."""


def layouts_of(engine: Any) -> list[tuple[int, list[tuple[str, int, int]]]]:
    return [
        (unit.numel, [(n, s.offset, s.numel) for n, s in zip(unit.names, unit.layout.slots, strict=True)])
        for unit in engine._sharded.units
        if unit.trainable
    ]


def reference_of(engine: Any, kind: str, model: Any) -> ReferenceOneBit:
    options = {"kind": kind, **KINDS[kind]}
    options.setdefault("freeze_step", options.get("var_freeze_step"))
    return ReferenceOneBit(model, layouts_of(engine), engine.world_size, **options)


def train_reference(reference: ReferenceOneBit, model: Any, steps: Sequence[Tensor]) -> None:
    for tokens in steps:
        grads = []
        for part in tokens.chunk(reference.world):
            model.zero_grad()
            loss_of(model, part).backward()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        reference.step(grads)


def _train(folder: str, kind: str) -> dict[str, float]:
    join()
    found = {}
    for stage in (0, 1, 2, 3):
        for name, extra in offloads(folder).items():
            if name and stage in (0, 2):
                continue
            engine = make_engine(None, section(stage, **extra), {"type": kind, "params": KINDS[kind]})
            plain = odd()
            train_reference(reference_of(engine, kind, plain), plain, data())
            train(engine, data())
            found[f"{stage} {name}"] = error(engine, plain)
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_offload_equals_the_paper(kind: str, world: int, tmp_path: Path) -> None:
    for found in run_workers(_train, world, str(tmp_path), kind):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}
