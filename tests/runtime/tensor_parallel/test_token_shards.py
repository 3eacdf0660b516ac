"""Test that models whose ranks divide the tokens between sharded layers train as one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import (
    BATCH,
    TOLERANCE,
    assert_equals_one_process,
    data,
    distance,
    make,
    settings,
)
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.parallel.token_shards import FAMILIES

pytestmark = needs_package("transformers")
SECTION = {"sequence_parallel": True}

# -- as one process


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "tensor", "stages", "changes", "more"),
    [
        (["llama"], 4, 2, [0, 1, 2, 3], {}, {}),
        (["llama", "qwen3"], 4, 4, [1, 3], {}, {"vocab_parallel_loss": True}),
        (["qwen3"], 2, 2, [3], {"vocab_size": 65, "attention_bias": True}, {}),
        (["gemma"], 2, 2, [2], {"tie_word_embeddings": True}, {}),
    ],
    ids=["stages", "shared heads", "biases", "tied"],
)
def test_training_equals_one_process(
    families: list[str],
    world: int,
    tensor: int,
    stages: list[int],
    changes: dict[str, Any],
    more: dict[str, Any],
) -> None:
    section = {**SECTION, **more}
    parallel = {"tensor": tensor}
    assert_equals_one_process(
        families, world, stages, parallel, attention="eager", changes=changes, tensor_parallel=section
    )


@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.parametrize("first", range(4))
def test_every_family_trains_as_one_process(first: int) -> None:
    families = ["gemma3_text" if each == "gemma3" else each for each in FAMILIES[first::4]]
    assert_equals_one_process(families, 2, [3], {"tensor": 2}, attention="eager", tensor_parallel=SECTION)


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_checkpointed_blocks_train_as_one_process() -> None:
    assert_equals_one_process(
        ["llama", "phi"],
        2,
        [1, 3],
        {"tensor": 2},
        attention="eager",
        tensor_parallel=SECTION,
        activation_checkpointing={"enabled": True},
    )


def _train(tensor: int, section: dict[str, Any], in_init: bool, reentrant: bool | None) -> dict[str, Tensor]:
    join()
    config = settings(3, tensor, 1, train_micro_batch_size_per_gpu=BATCH // 2, tensor_parallel=section)
    config["gradient_accumulation_steps"] = 2
    torch.set_default_dtype(torch.float64)
    if in_init:
        with zlaunch.zero.Init(config_dict_or_path=config):
            model = make("phi")
    else:
        model = make("phi")
    model.model.layers[0].input_layernorm.requires_grad_(False)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # or a reentrant checkpoint gives no gradients
    engine, *_ = zlaunch.initialize(model=model, config=config)
    for batch in data():
        halves = batch.chunk(2)
        # both passes before the first backward pass, with other lengths
        losses = [
            engine(input_ids=half[:, :length], labels=half[:, :length]).loss
            for half, length in zip(halves, (8, 6), strict=True)
        ]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        with torch.no_grad():
            engine(input_ids=batch[:, :5])  # cannot be divided, and need not be
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize(
    ("in_init", "reentrant"),
    [(False, None), (True, True), (False, False)],
    ids=["plain", "zero.Init, reentrant", "not reentrant"],
)
def test_passes_of_any_kind_train_as_one_process(in_init: bool, reentrant: bool | None) -> None:
    wanted = run_workers(_train, 1, 1, {}, False, None)[0]
    for found in run_workers(_train, 2, 2, SECTION, in_init, reentrant):
        assert distance(found, wanted) < TOLERANCE


# -- what it is for


def _costs(section: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return the bytes that a pass keeps for the gradients, and what was sent."""
    join()
    engine, *_ = zlaunch.initialize(model=make("llama"), config=settings(0, 2, 1, tensor_parallel=section))
    own = {each.untyped_storage().data_ptr() for each in engine.module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value
        return value

    tokens = data()[0][:, :8]
    engine.comm.moved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    return sum(each.untyped_storage().nbytes() for each in kept.values()), dict(engine.comm.moved)


def test_less_is_kept_and_about_as_much_is_sent() -> None:
    full = run_workers(_costs, 2, {})[0]
    divided = run_workers(_costs, 2, SECTION)[0]
    hidden = BATCH * 8 * 32
    assert full[0] - divided[0] >= 4 * 8 * hidden // 2, "half of the input of each of four norms, at least"
    # the gradient of the first block's input and the last block's output are gathered, and norms summed
    assert divided[1]["tensor"] == full[1]["tensor"] + 2 * hidden + 2 * 4 * 32


def _generate(tensor: int) -> list[int]:
    join()
    section = SECTION if tensor > 1 else {}
    config = settings(3, tensor, 1, tensor_parallel=section)
    engine, *_ = zlaunch.initialize(model=make("llama"), config=config)
    generate: Any = engine.module.generate
    found: Tensor = generate(input_ids=data()[0][:2, :5], max_new_tokens=7, do_sample=False, pad_token_id=0)
    tokens: list[int] = found.flatten().tolist()
    return tokens


def test_generation_is_that_of_one_process() -> None:
    wanted = run_workers(_generate, 1, 1)[0]
    assert run_workers(_generate, 2, 2) == [wanted] * 2


# -- what is refused


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Own()])


def _with_own_norm() -> nn.Module:
    model = make("llama")

    class Norm(nn.LayerNorm):
        """Is a norm of the script's own."""

    model.model.layers[1].input_layernorm = Norm(32, dtype=torch.float64)
    return model


_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
_HALF = {f"model.layers.*.mlp.{each}_proj": "colwise" for each in ("gate", "up")}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "own": (_Network, {"plan": _PLAN}, r"supports the Hugging Face models llama, .*; layers.0 is .*_Own"),
    "mixture": (lambda: make("mixtral"), {}, r"supports the .*; model.layers.0 is transformers.*Mixtral"),
    "norm": (_with_own_norm, {}, r"model.layers.1.input_layernorm is .*Norm, which may mix tokens"),
    "dropout": (lambda: make("llama", attention_dropout=0.1), {}, "the model has dropout"),
    "columns": (
        lambda: make("llama"),
        {"plan": _HALF},
        r"layers.0, LlamaDecoderLayer|mlp needs colwise layers",
    ),
}


def _refused_models() -> dict[str, str]:
    join()
    said = {}
    for name, (build, more, _) in MODELS.items():
        with pytest.raises(zlaunch.ParameterError) as caught:
            zlaunch.initialize(model=build(), config=settings(1, 2, 1, tensor_parallel={**SECTION, **more}))
        said[name] = str(caught.value)
    return said


def test_models_that_might_be_divided_wrongly_are_refused() -> None:
    for said in run_workers(_refused_models, 2):
        for name, (_, _, text) in MODELS.items():
            with pytest.raises(zlaunch.ParameterError, match=text):
                raise zlaunch.ParameterError(said[name])


CALLS = {
    "odd": r"LlamaDecoderLayer gets hidden states of shape \[8, 5, 32\].* divisible by 2: pad the batches",
    "states": "LlamaModel returns the hidden states of all blocks",
    "block": "LlamaDecoderLayer is called by itself: call the whole model",
    "attention": "model.layers.0.self_attn is called by itself",
    "forward": "the forward of model.layers.0.mlp is called directly",
    "early": "LlamaModel has not called its last block",
    "late": "LlamaDecoderLayer is not called in the order of the blocks",
}


def _refused_calls() -> dict[str, str]:
    join()
    model = make("llama")
    engine, *_ = zlaunch.initialize(model=model, config=settings(1, 2, 1, tensor_parallel=SECTION))
    tokens = data()[0][:, :8]
    hidden = torch.zeros(2, 4, 32, dtype=torch.float64)
    mlp: Any = model.model.layers[0].mlp
    blocks = model.model.layers

    def change_of_layers(changed: Any) -> None:
        blocks._modules.update(changed)
        engine(input_ids=tokens)

    calls: dict[str, Callable[[], Any]] = {
        "odd": lambda: engine(input_ids=tokens[:, :5]),
        "states": lambda: engine(input_ids=tokens, output_hidden_states=True),
        "block": lambda: blocks[0](hidden),
        "attention": lambda: model.model.layers[0].self_attn(hidden, None, None),
        "forward": lambda: _call_forward(engine, mlp, tokens),
        "early": lambda: _with_fewer_layers(engine, model, tokens),
        "late": lambda: change_of_layers({"0": blocks[1], "1": blocks[0]}),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(zlaunch.ParameterError) as caught:
            call()
        said[name] = str(caught.value)
    with torch.no_grad():
        mlp(hidden)
    return said


def _call_forward(engine: Any, mlp: Any, tokens: Tensor) -> None:
    """Call the forward of an MLP where its module would be called."""
    kept = mlp._call_impl
    mlp._call_impl = mlp.forward
    try:
        engine(input_ids=tokens)
    finally:
        mlp._call_impl = kept


def _with_fewer_layers(engine: Any, model: Any, tokens: Tensor) -> None:
    model.config.num_hidden_layers = 1
    try:
        engine(input_ids=tokens)
    finally:
        model.config.num_hidden_layers = 2


def test_calls_that_cannot_be_divided_are_refused_by_name() -> None:
    for said in run_workers(_refused_calls, 2):
        for name, text in CALLS.items():
            with pytest.raises(zlaunch.ParameterError, match=text):
                raise zlaunch.ParameterError(said[name])
