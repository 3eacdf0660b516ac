"""Test that the example trains in any layout as one process does, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from examples.gpt import GPT, Size, loss_of
from tests.runtime.model_parallel import BATCH, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers
from zlaunch.sequence import attention, mean, split

EXAMPLES = Path(__file__).parents[3] / "examples"


MICRO_BATCHES = 2
HAS_STAGES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
"""Tells whether torch is one that pipelines are made with."""


def _train(tensor: int, stage: int, sequence: int = 1, pipeline: int = 1) -> dict[str, Tensor]:
    join()
    ranks = torch.distributed.get_world_size() // tensor // sequence // pipeline
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    model = GPT(Size(layers=2, width=32, heads=4, context=16), attention=attention)
    section: dict[str, Any] = {}
    if tensor > 1:
        section["tensor_parallel"] = json.loads((EXAMPLES / "ds_tensor.json").read_text())["tensor_parallel"]
    count = MICRO_BATCHES if pipeline > 1 else 1
    config = {**settings(stage, tensor, ranks * count), **section, "gradient_accumulation_steps": count}
    config["parallel"] = {"tensor": tensor, "sequence": sequence, "pipeline": pipeline}
    engine, *_ = zlaunch.initialize(model=model, config=config)
    place = engine.data_parallel_rank
    for batch in data():
        own = batch[place * BATCH // ranks : (place + 1) * BATCH // ranks]
        positions = split(torch.arange(8), dim=0)
        given = [((split(m[:, :8]), positions), split(m[:, 1:9])) for m in own.chunk(count)]
        if pipeline > 1:
            engine.train_batch(iter(given), _mean_loss)
            continue
        (inputs, labels), *_ = given
        engine.backward(_mean_loss(engine(*inputs), labels))
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return mean(losses)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "tensor", "stage", "sequence", "pipeline"),
    [
        *((8, 2, 3, 1, 1), (4, 4, 1, 1, 1), (4, 2, 2, 1, 1), (8, 2, 3, 2, 1), (4, 1, 1, 4, 1)),
        *(((4, 1, 1, 1, 2), (8, 2, 1, 2, 2)) if HAS_STAGES else ()),
    ],
)
def test_the_example_trains_as_in_one_process(
    world: int, tensor: int, stage: int, sequence: int, pipeline: int
) -> None:
    wanted = run_workers(_train, 1, 1, 0)[0]
    for found in run_workers(_train, world, tensor, stage, sequence, pipeline):
        assert distance(found, wanted) < TOLERANCE


def test_its_loss_is_that_of_its_logits() -> None:
    torch.manual_seed(1)
    model = GPT(Size(layers=1, width=16, heads=2, context=8))
    text = torch.randint(0, 256, (2, 9))
    logits = model(text[:, :-1])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    torch.testing.assert_close(loss_of(model, text), wanted)
