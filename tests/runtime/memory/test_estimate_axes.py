"""Test what `zlaunch estimate` counts for ranks that share a model, beside what ranks of engines have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.model_parallel import FAMILIES, SIZES, make, settings
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.memory.activations import of_numbers
from zlaunch.runtime.memory.fake_step import of_module
from zlaunch.runtime.memory.model import ModelSizes, from_hugging_face, from_numbers, of_one_rank
from zlaunch.runtime.mesh import MeshShape

LAYERS: dict[str, Any] = {"num_hidden_layers": 3}


def _held(family: str, axes: dict[str, int]) -> tuple[int, int]:
    join()
    config = settings(1, 1, axes.get("expert", 1), parallel=axes)
    engine, *_ = zlaunch.initialize(model=make(family, **LAYERS), config=config)
    parameters = list(engine.module.parameters())
    experts = sum(
        p.numel() for p in parameters if getattr(getattr(p, "zlaunch_shard_spec", None), "of_experts", False)
    )
    return sum(p.numel() for p in parameters), experts


def _sizes(folder: Path, family: str) -> ModelSizes:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **LAYERS}).save_pretrained(folder)
    return from_hugging_face(str(folder))


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen3", {"tensor": 2}),
        ("mixtral", {"expert": 2}),
        ("mixtral", {"expert": 2, "tensor": 2}),
        ("llama", {"pipeline": 2}),
        ("mixtral", {"pipeline": 2, "tensor": 2}),
    ],
)
def test_sizes_are_those_of_the_heaviest_rank(tmp_path: Path, family: str, axes: dict[str, int]) -> None:
    mesh = MeshShape(**axes)
    one = of_one_rank(_sizes(tmp_path, family), mesh)
    held = run_workers(_held, mesh.ranks, family, axes)
    assert one.numel == max(numel for numel, _ in held)
    assert one.experts == (held[0][1] if mesh.expert > 1 else 0)


@pytest.mark.exhaustive
def test_activations_of_shared_layers(tmp_path: Path) -> None:
    whole = _sizes(tmp_path, "qwen3")
    alone = of_module(whole, 32, 4, torch.float32)
    shared = of_module(of_one_rank(whole, MeshShape(tensor=2)), 32, 4, torch.float32)
    assert alone is not None and shared is not None
    assert 0.5 * alone.plain < shared.plain < 0.9 * alone.plain


def test_sizes_by_numbers() -> None:
    whole = from_numbers(1_557_611_200, 1600, 48, 50257)
    root, layer = whole.blocks[0], whole.blocks[1]
    shared = of_one_rank(whole, MeshShape(tensor=2, pipeline=5))
    assert shared.blocks == (-(-root // 2), *[layer // 2] * 10)
    found = of_numbers(shared, 1024, 2, 2, tensor=2)
    assert found is not None and found.plain == (10 + 24 // 2) * 2048 * 1600 * 48 + 2048 * 50257 * 12
