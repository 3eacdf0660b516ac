"""Test LAMB and Muon beside plain torch: at all stages, on 1 to 3 ranks, offloaded, saved and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.collective_step.models import (
    FEW,
    cases_of,
    data,
    error,
    make_engine,
    offloads,
    section,
    train,
    train_reference,
)
from tests.runtime.collective_step.references import ReferenceLamb, ReferenceMuon, multiply_exactly
from tests.runtime.workers import join, run_workers

LAMB: dict[str, Any] = {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}}
MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1}}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {"Lamb": (LAMB, ReferenceLamb), "Muon": (MUON, ReferenceMuon)}
TOLERANCE = 1e-9


def _train(folder: str, kind: str, clip: float) -> dict[str, float]:
    join()
    multiply_exactly()
    optimizer, reference = KINDS[kind]
    wanted = train_reference(reference, data(FEW), clip)
    found = {}
    for stage in (0, 1, 2, 3):
        for name, extra in offloads(folder).items():
            if (stage, name) not in cases_of(torch.distributed.get_world_size()):
                continue
            engine = make_engine(None, section(stage, **extra), optimizer, gradient_clipping=clip)
            train(engine, data(FEW))
            found[f"{stage} {name}"] = error(engine, wanted)
            engine.destroy()
    return found


@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_offload_equals_plain_torch(kind: str, world: int, tmp_path: Path) -> None:
    for found in run_workers(_train, world, str(tmp_path), kind, 0.5 if world == 2 else 0.0):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _save(folder: str, kind: str) -> None:
    join()
    multiply_exactly()
    for stage, name in ((0, ""), (1, "host"), (3, ""), (3, "nvme")):
        zero = section(stage, **offloads(folder)[name])
        engine = make_engine(None, zero, KINDS[kind][0], gradient_accumulation_steps=2)
        train(engine, data(FEW)[: FEW // 2])
        engine.save_checkpoint(f"{folder}/saved", tag=f"{stage}{name}")
        engine.destroy()


def _resume(folder: str, kind: str) -> dict[str, float]:
    join()
    multiply_exactly()
    wanted = train_reference(KINDS[kind][1], data(FEW))
    found = {}
    for tag, stage, name in (("0", 3, "nvme"), ("1host", 0, ""), ("3", 2, "host"), ("3nvme", 3, "")):
        engine = make_engine(None, section(stage, **offloads(folder)[name]), KINDS[kind][0])
        engine.load_checkpoint(f"{folder}/saved", tag=tag)
        train(engine, data(FEW)[FEW // 2 :])
        found[tag] = error(engine, wanted)
        engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_resume_in_another_world(kind: str, before: int, after: int, tmp_path: Path) -> None:
    run_workers(_save, before, str(tmp_path), kind)
    for found in run_workers(_resume, after, str(tmp_path), kind):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


OPTIONS: dict[str, dict[str, Any]] = {
    "no_bias_correction": {"bias_correction": False},
    "bounds": {"min_coeff": 0.2, "max_coeff": 0.5},
    "inside": {"eps_inside_sqrt": True},
    "betas": {"betas": [0.8, 0.95]},
}


def _options() -> dict[str, float]:
    join()
    found = {}
    for name, options in OPTIONS.items():
        wanted = train_reference(partial(ReferenceLamb, **options), data(FEW))
        given = {"type": "lamb", "params": {**LAMB["params"], **options}}
        engine = make_engine(None, section(2), given)
        train(engine, data(FEW))
        found[name] = error(engine, wanted)
        engine.destroy()
    return found


@pytest.mark.rotated
def test_the_options_of_lamb_do_what_they_say() -> None:
    for found in run_workers(_options, 2):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}
