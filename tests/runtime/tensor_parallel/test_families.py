"""Test that Hugging Face models which ranks share train as one process does, in float64."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import (
    BATCH,
    LENGTH,
    TOLERANCE,
    Layout,
    assert_equals_one_process,
    assert_exports_whole_tensors,
    assert_resumes_under,
    assert_variants_train_alike,
    config_of,
    data,
    make,
    train,
)
from tests.runtime.workers import join, run_workers

pytestmark = needs_package("transformers")


COLUMNS = {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"}
ROWS = {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"}
SUMMED = {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
PACKED = {"patterns": [r".*\.gate_up_proj\.weight$"], "shape": [2, -1], "partition_dim": 0}
DOWN = {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"}


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("family", "specs"), [("qwen3", [COLUMNS, ROWS, SUMMED]), ("phi3", [PACKED, DOWN])], ids=["qwen3", "phi3"]
)
def test_deepspeeds_partition_config(family: str, specs: list[dict[str, Any]]) -> None:
    section = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
    assert_equals_one_process([family], 2, [1, 3], {"tensor": 2}, tensor_parallel=section)


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "tensor", "stages", "changes"),
    [
        (["llama", "qwen3"], 4, 2, [0, 1, 2, 3], {}),
        (["mistral", "gemma", "phi", "olmo", "olmo2", "phi3"], 4, 2, [3], {}),
        (["mixtral", "qwen3_moe", "deepseek_v2"], 4, 2, [3], {}),
        (["llama", "qwen3"], 4, 4, [1, 3], {}),
        (["llama", "gemma"], 2, 2, [2], {"tie_word_embeddings": True}),
        (["qwen3"], 2, 2, [3], {"vocab_size": 65, "attention_bias": True}),
    ],
    ids=["stages", "families", "mixtures", "shared heads", "tied", "odd vocabulary"],
)
def test_training_equals_one_process(
    families: list[str], world: int, tensor: int, stages: list[int], changes: dict[str, Any]
) -> None:
    assert_equals_one_process(families, world, stages, {"tensor": tensor}, attention="eager", changes=changes)


class _Wrapped(torch.nn.Module):
    """Is a script's own module around a model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def _train_wrapped(tensor: int) -> tuple[list[float], tuple[int, ...]]:
    join()
    model = _Wrapped(make("llama"))
    engine, *_ = zlaunch.initialize(model=model, config=config_of(3, {"tensor": tensor}))
    weight = engine.module.get_parameter("inner.model.layers.0.self_attn.k_proj.weight")
    return train(engine), tuple(weight.shape)


@pytest.mark.exhaustive
@pytest.mark.multi_gpu
def test_a_model_inside_of_another_brings_its_plan() -> None:
    wanted, whole = run_workers(_train_wrapped, 1, 1)[0]
    for losses, shape in run_workers(_train_wrapped, 4, 4):
        assert losses == pytest.approx(wanted, abs=TOLERANCE)
        assert shape == (8, 32) and whole == (16, 32)


TIED = {"tie_word_embeddings": True}
SHARDED = Layout(4, {"tensor": 2}, 3)
LAYOUTS = [
    Layout(1, {}, 0),
    Layout(2, {}, 3),
    Layout(2, {"tensor": 2}, 1),
    Layout(2, {"tensor": 2}, 3),
    Layout(4, {"tensor": 2}, 2),
    Layout(4, {"tensor": 4}, 3),
    Layout(4, {"tensor": 4}, 0),
]


@pytest.mark.multi_gpu
@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "others"),
    [(SHARDED, LAYOUTS), (Layout(4, {"tensor": 4}, 1), LAYOUTS[2:4]), (LAYOUTS[0], LAYOUTS[2:4])],
    ids=["sharded", "stage 1", "one rank"],
)
def test_a_checkpoint_resumes_under_any_layout(saved: Layout, others: list[Layout], tmp_path: Path) -> None:
    assert_resumes_under(tmp_path, saved, others, "qwen3", attention="eager", changes=TIED)


@pytest.mark.exhaustive
@pytest.mark.multi_gpu
def test_an_export_is_whole(tmp_path: Path) -> None:
    assert_exports_whole_tensors(tmp_path, SHARDED, "qwen3", attention="eager", changes=TIED)


@pytest.mark.exhaustive
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["offload", "disk", "recomputation"])
def test_what_else_the_runtime_does_goes_with_it(kind: str, tmp_path: Path) -> None:
    assert_variants_train_alike(kind, "qwen3", 4, {"tensor": 2}, tmp_path, attention="eager", changes=TIED)


def _handles() -> dict[str, Any]:
    rank, found = join(), dict[str, Any]()
    model = make("llama")
    wanted = copy.deepcopy(model).state_dict()
    engine, *_ = zlaunch.initialize(model=model, config=config_of(3, {"tensor": 2}))
    found["part"] = tuple(engine.module.get_parameter("model.layers.0.mlp.up_proj.weight").shape)
    state = engine.module.state_dict()
    found["state"] = all(torch.equal(state[name], value) for name, value in wanted.items())
    doubled = {name: value * 2 for name, value in wanted.items()}
    engine.module.load_state_dict(doubled)
    after = engine.module.state_dict()
    found["loaded"] = all(torch.equal(after[name], value) for name, value in doubled.items())
    try:
        batch = torch.full((2, 4), 3 + rank)
        engine(input_ids=batch, labels=batch)
    except zlaunch.ZlaunchError as error:
        found["batches"] = str(error)
    return found


def test_handles_give_whole_tensors_and_different_batches_are_refused() -> None:
    for found in run_workers(_handles, 2):
        assert found["part"] == (24, 32)
        assert found["state"] and found["loaded"]
        assert "ranks 0 to 1 are one tensor-parallel group" in found["batches"]


def _moved() -> tuple[int, int]:
    join()
    engine, *_ = zlaunch.initialize(model=make("llama"), config=config_of(1, {"tensor": 2}))
    batch = data()[0]
    engine(input_ids=batch, labels=batch)  # the first one
    comm = engine.comm
    before = comm.moved["tensor"]
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    tokens, width, layers, words = BATCH * LENGTH, 32, 2, 64
    return comm.moved["tensor"] - before, tokens * (layers * 8 * width + 4 * width + words)


def test_what_the_axis_moves_is_the_formula() -> None:
    for moved, wanted in run_workers(_moved, 2):
        assert moved == wanted


def _loss() -> list[float]:
    join()
    found = []
    for is_parallel in (False, True):
        section = {"autotp_size": 2, "vocab_parallel_loss": is_parallel}
        config = {**config_of(2, {"tensor": 2}), "parallel": {}, "tensor_parallel": section}
        engine, *_ = zlaunch.initialize(model=make("llama"), config=config)
        found.append(train(engine)[-1])
        engine.destroy()
    return found


@pytest.mark.multi_gpu
def test_the_vocabulary_parallel_loss_is_the_loss() -> None:
    for plain_loss, parallel in run_workers(_loss, 2):
        assert parallel == pytest.approx(plain_loss, rel=1e-9)


def _sampled() -> str:
    rank = join()
    engine, *_ = zlaunch.initialize(model=make("llama"), config=config_of(1, {"tensor": 2}))
    train(engine)
    train(engine)
    engine.eval()
    torch.manual_seed(rank)
    try:
        generate: Any = engine.module.generate
        generate(input_ids=data()[0][:4, :4], max_new_tokens=20, do_sample=True, pad_token_id=0)
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


def test_words_that_each_rank_samples_for_itself_are_refused() -> None:
    for said in run_workers(_sampled, 2):
        assert "got different batches" in said and "generate" in said


def _labels_of_no_word() -> list[str]:
    join()
    config = {
        **config_of(1, {"tensor": 2}),
        "parallel": {},
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_loss": True},
    }
    engine, *_ = zlaunch.initialize(model=make("llama"), config=config)
    batch, said = data()[0], []
    for label in (64, -7):
        labels = batch.clone()
        labels[0, 3] = label
        try:
            engine(input_ids=batch, labels=labels)
        except (IndexError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_a_label_of_no_word_is_an_error_as_in_one_process() -> None:
    for said in run_workers(_labels_of_no_word, 2):
        assert len(said) == 2 and all("out of bounds" in each for each in said)


def _dropout() -> tuple[list[float], int]:
    rank = join()
    engine, *_ = zlaunch.initialize(
        model=make("phi", resid_pdrop=0.3, embd_pdrop=0.3), config=config_of(1, {"tensor": 2})
    )
    torch.manual_seed(rank)  # what scripts do that give each rank other samples
    losses = []
    for batch in data():
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, os.getpid()


def test_dropout_is_equal_where_activations_are() -> None:
    (first, one), (second, other) = run_workers(_dropout, 2)
    assert first == second and one != other


def _whole_optimizer() -> str:
    join()
    model = make("llama")
    optimizer = torch.optim.Adafactor(model.parameters())
    config = {**config_of(0, {"tensor": 2}), "optimizer": None}
    try:
        zlaunch.initialize(model=model, optimizer=optimizer, config=config)
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    for said in run_workers(_whole_optimizer, 2):
        assert "optimizer Adafactor needs whole parameters" in said


def _refused(family: str, tensor: int, changes: dict[str, Any], config: dict[str, Any]) -> str:
    join()
    try:
        model = make(family, **changes) if family != "none" else torch.nn.Linear(4, 4)
        zlaunch.initialize(model=model, config={**config_of(1, {"tensor": tensor}), **config})
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "changes", "config", "text"),
    [
        ("none", {}, {}, "Linear has no plan"),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, {},
         "cannot shard 3 attention heads and"),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 24}, {},
         "cannot shard 1 attention head and 1 key-value head over 2 ranks; possible sizes: 1"),
        ("llama", {"intermediate_size": 45}, {},
         "cannot be divided by 2; possible sizes: 1, 3, 5, 9, 15, 45"),
        ("llama", {}, {"tensor_parallel": {"plan": {"model.layers.*.mlp.up_pro": "colwise"}}},
         "or parameter matches model.layers.*.mlp.up_pro, did you mean model.layers.*.mlp.up_proj?"),
        ("llama", {}, {"tensor_parallel": {"plan": {"model.embed_tokens": "colwise"}}},
         "is an Embedding: colwise"),
        ("llama", {}, {"tensor_parallel": {"plan": {"model.norm": "colwise"}}},
         "is a transformers.models.llama.modeling_llama.LlamaRMSNorm: colwise is for"),
        ("llama", {}, {"tensor_parallel": {"plan": {"lm_head": "sideways"}}}, "'sideways' is not supported"),
    ],
    ids=["no plan", "heads", "one head", "width", "name", "class", "another's class", "style"],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(
    family: str, changes: dict[str, Any], config: dict[str, Any], text: str
) -> None:
    for said in run_workers(_refused, 2, family, 2, changes, config):
        assert text in said and said
