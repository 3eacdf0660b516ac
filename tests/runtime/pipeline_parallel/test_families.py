"""Test that Hugging Face models whose layers ranks divide train as one process does, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.needs import needs_package
from tests.runtime.tensor_parallel.families import make, plain
from tests.runtime.tensor_parallel.task import STEPS, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers

pytestmark = needs_package("transformers")
MICRO_BATCHES = 4
LAYERS = {"num_hidden_layers": 4}


def config_of(stage: int, parallel: dict[str, int], **section: Any) -> dict[str, Any]:
    """Return a config for the ranks that there are."""
    samples = torch.distributed.get_world_size()
    for name, size in parallel.items():
        samples //= size if name != "expert" else 1
    count = MICRO_BATCHES if parallel.get("pipeline", 1) > 1 else 1
    found = settings(stage, 1, samples * count)
    return {**found, "parallel": parallel, "pipeline": section, "gradient_accumulation_steps": count}


def train(engine: Any, first: int = 0, last: int = STEPS) -> list[float]:
    """Train on this rank's samples; return the mean losses of all ranks."""
    losses = []
    for batch in data()[first:last]:
        own = batch.chunk(engine.data_parallel_size)[engine.data_parallel_rank]
        if hasattr(engine, "train_batch"):
            micro = own.chunk(engine.gradient_accumulation_steps())
            losses.append(engine.train_batch(iter({"input_ids": m, "labels": m} for m in micro)).item())
            continue
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / engine.world_size)
    return losses


def _train_families(
    families: list[str],
    parallel: dict[str, int],
    stages: list[int],
    section: dict[str, Any],
    changes: dict[str, Any],
) -> Any:
    join()
    worst = {}
    for family in families:
        losses, wanted = plain(make(family, "sdpa", **{**LAYERS, **changes}))
        for stage in stages:
            model = make(family, "sdpa", **{**LAYERS, **changes})
            engine, *_ = zlaunch.initialize(model=model, config=config_of(stage, parallel, **section))
            own = train(engine)
            worst[family, stage] = (
                distance(engine.module.state_dict(), wanted),
                max(abs(a - b) for a, b in zip(own, losses, strict=True)),
            )
            engine.destroy()
    return worst


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "parallel", "stages", "section", "changes"),
    [
        (["llama"], 2, {"pipeline": 2}, [0], {"schedule": "gpipe"}, {}),
        (["mixtral", "gemma"], 4, {"pipeline": 2}, [1], {"schedule": "1f1b"}, {}),
        (["gpt2"], 2, {"pipeline": 2}, [1], {"schedule": "interleaved"}, {}),
        (["qwen3"], 4, {"pipeline": 4}, [1], {}, {**WINDOWS, "tie_word_embeddings": True}),
        (["llama"], 2, {"pipeline": 2}, [1], {"partition": [1]}, {}),
        (["mixtral"], 8, {"pipeline": 2, "tensor": 2, "sequence": 2}, [1], {}, {}),
        (["mixtral"], 8, {"pipeline": 2, "expert": 2, "sequence": 2}, [1], {}, {}),
    ],
    ids=["gpipe", "1f1b", "interleaved", "tied and windows", "partition", "three axes", "experts"],
)
def test_training_equals_one_process(
    families: list[str],
    world: int,
    parallel: dict[str, int],
    stages: list[int],
    section: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    for worst in run_workers(_train_families, world, families, parallel, stages, section, changes):
        assert len(worst) == len(families) * len(stages)
        for case, errors in worst.items():
            assert max(errors) < TOLERANCE, (case, errors)


def _resume(folder: str, parallel: dict[str, int], stage: int, first: bool) -> list[float]:
    join()
    model = make("qwen3", "sdpa", tie_word_embeddings=True, **LAYERS)
    engine, *_ = zlaunch.initialize(model=model, config=config_of(stage, parallel))
    if first:
        losses = train(engine, last=2)
        engine.save_checkpoint(folder)
        return losses + train(engine, first=2)
    assert engine.load_checkpoint(folder)[0] is not None
    return train(engine, first=2)


LAYOUTS: list[tuple[int, dict[str, int], int]] = [
    (1, {}, 0),
    (2, {"pipeline": 2}, 0),
    (4, {"pipeline": 2}, 1),
    (4, {"pipeline": 2, "tensor": 2}, 1),
    (4, {"pipeline": 2, "sequence": 2}, 0),
    (4, {"tensor": 2}, 3),
    (4, {"pipeline": 4}, 1),
    (4, {"sequence": 2}, 2),
]


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "saved",
    [pytest.param(3, marks=pytest.mark.exhaustive), 5, 2],
    ids=["stages and tensor", "tensor", "stages"],
)
def test_a_checkpoint_resumes_under_any_layout(tmp_path: Any, saved: int) -> None:
    folder = str(tmp_path)
    world, parallel, stage = LAYOUTS[saved]
    losses = run_workers(_resume, world, folder, parallel, stage, True)[0]
    for layout in LAYOUTS if saved == 3 else LAYOUTS[:3]:
        resumed = run_workers(_resume, layout[0], folder, *layout[1:], False)[0]
        assert resumed == pytest.approx(losses[2:], abs=TOLERANCE), layout
