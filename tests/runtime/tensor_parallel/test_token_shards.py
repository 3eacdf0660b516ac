"""Test that models whose ranks divide the tokens between sharded layers train as one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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

SECTION = {"sequence_parallel": True}
PLAN = {f"blocks.*.{layer}": "colwise" for layer in ("mix.q", "mix.k", "mix.v", "mlp.up")}
PLAN |= {"blocks.*.mix.out": "rowwise", "blocks.*.mlp.down": "rowwise"}
WIDTH = 8
HEADS = 4


class _Mix(nn.Module):
    """Attends to earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        def heads(layer: nn.Linear) -> Tensor:
            found: Tensor = layer(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            return found

        q = heads(self.q)
        found = functional.scaled_dot_product_attention(q, heads(self.k), heads(self.v), is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return self.down(torch.tanh(self.up(hidden_states))), None


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = _Mix()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.mlp = _Mlp()

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        hidden = hidden + self.mix(self.norm(hidden))
        return hidden + self.scale * self.mlp(hidden_states=hidden)[0], "more"


class _Network(nn.Module):
    def __init__(self, block: type[nn.Module] = _Block, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.words = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.words(words)
        for block in self.blocks:
            if self.is_checkpointed:
                hidden, _ = checkpoint(block, hidden, use_reentrant=True)
            else:
                hidden, _ = block(hidden)
        found: Tensor = self.norm(hidden)
        return found


# -- as one process


@needs_package("transformers")
@pytest.mark.rotated
@pytest.mark.multi_gpu
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("families", "world", "tensor", "stages", "changes", "more"),
    [
        (["llama"], 4, 2, [0, 1, 2, 3], {}, {}),
        (["qwen3", "mistral", "gemma2", "phi", "olmo"], 2, 2, [3], {}, {}),
        (["llama", "qwen3"], 4, 4, [1, 3], {}, {"vocab_parallel_loss": True}),
        (["qwen3"], 2, 2, [3], {"vocab_size": 65, "attention_bias": True}, {}),
        (["gemma"], 2, 2, [2], {"tie_word_embeddings": True}, {}),
    ],
    ids=["stages", "families", "shared heads", "biases", "tied"],
)
def test_families_train_as_one_process(
    families: list[str],
    world: int,
    tensor: int,
    stages: list[int],
    changes: dict[str, Any],
    more: dict[str, Any],
) -> None:
    assert_equals_one_process(
        families,
        world,
        stages,
        {"tensor": tensor},
        attention="eager",
        changes=changes,
        tensor_parallel={**SECTION, **more},
    )


@needs_package("transformers")
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


def _train(tensor: int, section: dict[str, Any], in_init: bool, is_checkpointed: bool) -> dict[str, Tensor]:
    join()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    config = settings(3, tensor, 1, train_micro_batch_size_per_gpu=BATCH // 2, tensor_parallel=section)
    config["gradient_accumulation_steps"] = 2
    if in_init:
        with zlaunch.zero.Init(config_dict_or_path=config):
            model = _Network(is_checkpointed=is_checkpointed)
    else:
        model = _Network(is_checkpointed=is_checkpointed)
    model.blocks[0].get_submodule("norm").requires_grad_(False)
    engine, *_ = zlaunch.initialize(model=model, config=config)
    for batch in data():
        for half in batch.chunk(2):
            engine.backward(engine(half[:, :8]).square().mean())
            engine.step()
        with torch.no_grad():
            engine(batch[:, :5])  # cannot be divided, and need not be
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize(
    ("in_init", "is_checkpointed"), [(False, False), (True, True)], ids=["plain", "zero.Init, checkpointed"]
)
def test_a_model_of_ones_own_trains_as_one_process(in_init: bool, is_checkpointed: bool) -> None:
    wanted = run_workers(_train, 1, 1, {}, False, False)[0]
    for found in run_workers(_train, 2, 2, {**SECTION, "plan": PLAN}, in_init, is_checkpointed):
        assert distance(found, wanted) < TOLERANCE


# -- what it is for


def _costs(section: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return the bytes that the pass has saved for the gradients, and what was sent."""
    join()
    torch.manual_seed(4)
    model = _Network()
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        norm.requires_grad_(False)
    model.requires_grad_(False)
    model.words.requires_grad_(True)
    engine, *_ = zlaunch.initialize(model=model, config=settings(0, 2, 1, tensor_parallel=section))
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return value

    engine.comm.moved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = engine(data()[0][:, :8]).square().mean()
    engine.backward(loss)
    return sum(saved.values()), dict(engine.comm.moved)


def test_less_is_saved_and_as_much_is_sent() -> None:
    full = run_workers(_costs, 2, {"plan": PLAN})[0]
    divided = run_workers(_costs, 2, {"plan": PLAN, **SECTION})[0]
    hidden = BATCH * 8 * WIDTH
    assert full[0] - divided[0] >= 2 * 4 * hidden // 2, "half of the input of each norm, at least"
    # the input of the first block is divided, which costs nothing, and its gradient gathered
    assert divided[1]["tensor"] == full[1]["tensor"] + 2 * hidden


@needs_package("transformers")
def test_generation_is_that_of_one_process() -> None:
    wanted = run_workers(_generate, 1, 1)[0]
    assert run_workers(_generate, 2, 2) == [wanted] * 2


def _generate(tensor: int) -> list[int]:
    join()
    section = SECTION if tensor > 1 else {}
    engine, *_ = zlaunch.initialize(
        model=make("llama"), config=settings(3, tensor, 1, tensor_parallel=section)
    )
    generate: Any = engine.module.generate
    found: Tensor = generate(input_ids=data()[0][:2, :5], max_new_tokens=7, do_sample=False, pad_token_id=0)
    tokens: list[int] = found.flatten().tolist()
    return tokens


# -- what is refused


class _Convolved(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(WIDTH, WIDTH, 3)


class _Gated(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp.gate = nn.Linear(WIDTH, 1)


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)


class _Dropped(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


class _Flattened(_Block):
    """Gives its MLP rows of tokens."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        return hidden + self.mlp(hidden.reshape(-1, WIDTH))[0].view_as(hidden), ""


class _Direct(_Block):
    """Calls the forward of its attention."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        return hidden + self.mix.forward(hidden), ""


class _Averaged(_Block):
    """Adds the mean of all tokens."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        found: tuple[Tensor, str] = super().forward(hidden * 2)
        return found[0] + hidden.mean(1, keepdim=True), ""


class _Shifted(_Block):
    """Adds each token to the next."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        found: tuple[Tensor, str] = super().forward(hidden)
        return functional.pad(found[0][:, :-1], (0, 0, 1, 0)) + found[0], ""


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


_FLAT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
_WORDS = {"words": "embedding_rowwise"}
WRONG: dict[str, tuple[type[nn.Module], dict[str, str], str]] = {
    "convolution": (_Convolved, PLAN, r"blocks.0.mixer.weight has 3 dimensions"),
    "gate": (_Gated, PLAN, r"blocks.\d.mlp.gate.weight is not sharded"),
    "block itself": (
        _Flat,
        _FLAT,
        r"the sharded linear layers of blocks.0 have to be in modules of their own",
    ),
    "dropout": (_Dropped, PLAN, "the model has dropout"),
    "no block": (_Bare, _WORDS, r"needs one torch.nn.ModuleList of blocks .* it has none"),
    "columns alone": (
        _Block,
        {"blocks.*.mlp.up": "colwise"},
        r"blocks.\d.mlp needs colwise layers and a row",
    ),
    "gathered": (
        _Block,
        {**PLAN, "blocks.*.mlp.up": "colwise_gather_output", "blocks.*.mlp.down": "rowwise_split_input"},
        r"blocks.0.mlp.up is neither colwise nor rowwise",
    ),
    "rows": (_Flattened, PLAN, r"blocks.0.mlp gets hidden states of shape \[32, 8\]"),
    "mean": (_Averaged, PLAN, "mean may mix tokens behind the first block's input"),
    "shift": (_Shifted, PLAN, "__getitem__ may mix tokens behind the first block's input"),
    "direct call": (_Direct, PLAN, r"the forward of blocks.0.mix is called directly"),
}


def _refuse() -> dict[str, str]:
    join()
    said = {}
    for name, (kind, plan, _) in WRONG.items():
        try:
            config = settings(1, 2, 1, tensor_parallel={**SECTION, "plan": plan})
            engine, *_ = zlaunch.initialize(model=_Network(kind), config=config)
            engine(data()[0][:, :8])
        except zlaunch.ParameterError as error:
            said[name] = str(error)
    config = settings(1, 2, 1, tensor_parallel={**SECTION, "plan": PLAN})
    engine, *_ = zlaunch.initialize(model=_Network(), config=config)
    hidden = torch.zeros(2, 4, WIDTH)
    block = engine.module.get_submodule("blocks.0")
    attention = engine.module.get_submodule("blocks.0.mix")
    calls: dict[str, Callable[[], Any]] = {
        "odd": lambda: engine(data()[0][:, :5]),
        "block": lambda: block(hidden),
        "attention": lambda: attention(hidden),
    }
    for name, call in calls.items():
        try:
            call()
        except zlaunch.ParameterError as error:
            said[name] = str(error)
    with torch.no_grad():
        attention(hidden)
    return said


def test_what_would_be_wrong_is_refused_by_name() -> None:
    wanted = {name: text for name, (_, _, text) in WRONG.items()}
    wanted["odd"] = r"Block gets hidden states of shape \[8, 5, 8\].* tokens divisible by 2: pad the batches"
    wanted["block"] = "_Block is called by itself: call the whole model"
    wanted["attention"] = "blocks.0.mix is called by itself"
    for said in run_workers(_refuse, 2):
        assert said.keys() == wanted.keys()
        for name, text in wanted.items():
            with pytest.raises(zlaunch.ParameterError, match=text):
                raise zlaunch.ParameterError(said[name])
