"""Test that Hugging Face models whose sequences ranks share train as one process does, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.model_parallel import (
    BATCH,
    TOLERANCE,
    Layout,
    assert_equals_one_process,
    assert_resumes_under,
    config_of,
    data,
    make,
    train,
)
from tests.runtime.workers import join, run_workers

DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}
LONG: dict[str, Any] = {
    "max_position_embeddings": 32,
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8},
        **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
}
"""Let frequencies depend on the length of a sequence, 12 tokens here."""


@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "parallel", "stages", "changes"),
    [
        (["llama", "qwen3"], 4, {"sequence": 2}, [0, 1, 2, 3], {}),
        (["gpt2", "mixtral", "gemma", "mistral"], 4, {"sequence": 2}, [3], {}),
        (["llama"], 4, {"sequence": 4}, [1, 3], {}),
        (["mistral"], 2, {"sequence": 2}, [2], {"sliding_window": 5}),
        (["llama", "qwen3"], 4, {"sequence": 2, "tensor": 2}, [1, 3], {"num_key_value_heads": 4}),
        (["mixtral"], 4, {"sequence": 2, "expert": 2}, [0, 3], {}),
        (["llama"], 2, {"sequence": 2}, [1], DYNAMIC),
        (["phi3"], 2, {"sequence": 2}, [1], LONG),
    ],
    ids=["stages", "families", "shared heads", "window", "tensor", "expert", "dynamic", "longrope"],
)
def test_training_equals_one_process(
    families: list[str],
    world: int,
    parallel: dict[str, int],
    stages: list[int],
    changes: dict[str, Any],
) -> None:
    assert_equals_one_process(families, world, stages, parallel, changes=changes)


def _inputs() -> dict[str, torch.Tensor]:
    """Make documents packed into rows, and labels of which most at the front are ignored."""
    length = data()[0].shape[1]
    positions = torch.arange(length).repeat(BATCH, 1)
    for row in range(BATCH):
        positions[row, 3 + row % 7 :] -= 3 + row % 7
    labels = torch.full((BATCH, length), -100)
    labels[:, 5:] = torch.randint(3, 64, (BATCH, length - 5), generator=torch.Generator().manual_seed(4))
    return {"position_ids": positions, "labels": labels}


def _padded() -> dict[str, torch.Tensor]:
    """Make masks of rows that end early."""
    length = data()[0].shape[1]
    mask = torch.arange(length).expand(BATCH, length) < torch.arange(4, 4 + BATCH).unsqueeze(1)
    labels = data()[1].masked_fill(~mask, -100)
    return {"attention_mask": mask.long(), "labels": labels}


KINDS = {"packed": _inputs, "padded": _padded}


def _train_with(kind: str, sequence: int, changes: dict[str, Any], recomputes: bool) -> list[float]:
    join()
    model = make("qwen3", "sdpa", **changes)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = zlaunch.initialize(model=model.train(), config=config_of(3, {"sequence": sequence}))
    inputs: dict[str, Any] = KINDS[kind]()
    return train(engine, **inputs)


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "has_cache"), [("packed", False), ("packed", True), ("padded", False)])
def test_masks_positions_and_ignored_labels_are_those_of_whole_sequences(kind: str, has_cache: bool) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    changes = {**window, "use_cache": has_cache}
    wanted = run_workers(_train_with, 1, kind, 1, changes, False)[0]
    for recomputes in (False, True):
        for losses in run_workers(_train_with, 2, kind, 2, changes, recomputes):
            assert losses == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.multi_gpu
@pytest.mark.exhaustive
def test_a_checkpoint_resumes_under_any_layout(tmp_path: Path) -> None:
    saved = Layout(4, {"sequence": 2, "tensor": 2}, 3)
    others = [
        Layout(1, {}, 0),
        Layout(2, {"sequence": 2}, 3),
        Layout(4, {"sequence": 2}, 1),
        Layout(4, {"tensor": 2}, 2),
        Layout(4, {"sequence": 4}, 3),
    ]
    assert_resumes_under(tmp_path, saved, others, "qwen3", changes={"tie_word_embeddings": True})


def _moved() -> tuple[int, int]:
    join()
    engine, *_ = zlaunch.initialize(model=make("llama", "sdpa"), config=config_of(1, {"sequence": 2}))
    batch = data()[0]
    engine(input_ids=batch, labels=batch)
    comm = engine.comm
    before = comm.moved["sequence"]
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    tokens, width, keys, layers = batch.numel() // 2, 32, 16, 2
    loss = 2 * 2  # the sum of losses and their number
    return comm.moved["sequence"] - before, layers * 4 * tokens * (width + keys) + loss


def test_what_the_axis_moves_is_the_formula() -> None:
    for moved, wanted in run_workers(_moved, 2):
        assert moved == wanted


def _refused(family: str, changes: dict[str, Any], inputs: dict[str, Any]) -> str:
    rank = join()
    try:
        attention = changes.pop("attention", "sdpa")
        engine, *_ = zlaunch.initialize(
            model=make(family, attention, **changes), config=config_of(1, {"sequence": 2})
        )
        batch = data()[0]
        if inputs.pop("differ", False):
            batch = batch + rank
        engine(**{"input_ids": batch, "labels": batch} | inputs)
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "changes", "inputs", "text"),
    [
        ("llama", {"attention": "eager"}, {}, 'load it with attn_implementation="sdpa"'),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, {},
         "3 attention heads and 3 key-value heads cannot be divided by 2 ranks; possible sizes: 1, 3"),
        ("llama", {}, {"input_ids": torch.ones(2, 7).long(), "labels": None},
         "7 tokens cannot be divided by 2 ranks"),
        ("llama", {}, {"labels": torch.ones(8, 10).long()}, "labels is [8, 10], but there are 12 tokens"),
        ("llama", {}, {"use_cache": True}, "use_cache=True is not supported"),
        ("llama", {}, {"logits_to_keep": 2}, "logits_to_keep is not supported"),
        ("mixtral", {}, {"output_router_logits": True}, "output_router_logits"),
        ("llama", {}, {"differ": True}, "ranks 0, 1 are one sequence-parallel group"),
        ("mamba", {"attention": "eager"}, {}, "MambaForCausalLM is not supported"),
    ],
    ids=["eager", "heads", "length", "labels", "cache", "kept logits", "router", "batches", "state"],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    family: str, changes: dict[str, Any], inputs: dict[str, Any], text: str
) -> None:
    for said in run_workers(_refused, 2, family, changes, inputs):
        assert text in said and said


def _evaluate() -> tuple[float, float, list[int], list[int]]:
    join()
    batch = data()[0]
    plain_model: Any = make("llama", "sdpa").eval()
    with torch.no_grad():
        wanted = plain_model(input_ids=batch, labels=batch).loss.item()
    words = plain_model.generate(batch[:1, :3], max_new_tokens=4, do_sample=False)[0].tolist()
    engine, *_ = zlaunch.initialize(model=make("llama", "sdpa"), config=config_of(3, {"sequence": 2}))
    engine.eval()
    with torch.no_grad():
        loss = engine(input_ids=batch, labels=batch).loss.item()
    divided: Any = engine.module
    found = divided.generate(batch[:1, :3], max_new_tokens=4, do_sample=False)[0].tolist()
    return loss, wanted, found, words


def test_evaluation_and_generation_are_those_of_the_whole_model() -> None:
    for loss, wanted, found, words in run_workers(_evaluate, 2):
        assert loss == pytest.approx(wanted, abs=TOLERANCE) and found == words
