"""Test MLPs and losses in tiles of tokens in Hugging Face models, and what they leave of a step's memory."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zlaunch
from tests.runtime.model_parallel import TOLERANCE, config_of, make, train
from tests.runtime.workers import join, run_workers


def _train(
    world: int, parallel: dict[str, int], stage: int, section: dict[str, Any], shifts: bool = False
) -> list[float]:
    join()
    model = make("qwen3", "sdpa", tie_word_embeddings=True, use_cache=False)
    config = {**config_of(stage, parallel), "activation_checkpointing": section}
    engine, *_ = zlaunch.initialize(model=model.train(), config=config)
    labels = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(4))
    labels[:, :5] = -100
    if not shifts:
        return train(engine, labels=labels)
    shifted = torch.cat([labels[:, 1:], torch.full((8, 1), -100)], 1)
    return train(engine, shift_labels=shifted)


TILED = {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 6}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "parallel", "stage", "section"),
    [
        (2, {}, 3, TILED),
        (2, {"sequence": 2}, 3, TILED),
        (2, {"sequence": 2}, 1, {**TILED, "enabled": True}),
        (4, {"sequence": 2, "tensor": 2}, 2, TILED),
    ],
    ids=["data", "sequence", "recomputed", "tensor"],
)
def test_training_with_tiles_equals_one_process(
    world: int, parallel: dict[str, int], stage: int, section: dict[str, Any]
) -> None:
    wanted = run_workers(_train, 1, 1, {}, 0, {})[0]
    for losses in run_workers(_train, world, world, parallel, stage, section):
        assert losses == pytest.approx(wanted, abs=TOLERANCE)


def test_shifted_labels_of_whole_sequences_are_divided() -> None:
    wanted = run_workers(_train, 1, 1, {}, 0, {}, True)[0]
    for losses in run_workers(_train, 2, 2, {"sequence": 2}, 3, TILED, True):
        assert losses == pytest.approx(wanted, abs=TOLERANCE)


def _said(section: dict[str, Any], family: str) -> str:
    join()
    model: Any = nn.Linear(4, 4) if family == "none" else make(family, "eager")
    try:
        config = {**config_of(1, {}), "activation_checkpointing": section}
        engine, *_ = zlaunch.initialize(model=model.train(), config=config)
        train(engine)
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("section", "family", "text"),
    [
        ({"tiled_loss": True}, "none", "tiled_loss needs a Hugging Face model with the loss ForCausalLM"),
        ({"tiled_mlp": True}, "none", "no MLP modules named mlp"),
        ({"tiled_loss": True}, "gemma2", "changes its logits before the loss"),
    ],
    ids=["loss", "mlp", "capped"],
)
def test_what_cannot_be_tiled_is_refused(section: dict[str, Any], family: str, text: str) -> None:
    assert text in run_workers(_said, 1, section, family)[0]


def _read() -> tuple[Any, list[str], int, str]:
    join()
    config = {**config_of(1, {}), "activation_checkpointing": {"tiled_loss": True}}
    with redirect_stdout(io.StringIO()) as said:
        engine, *_ = zlaunch.initialize(model=make("llama", "eager", use_cache=False).train(), config=config)
    tokens = torch.full((2, 4), 5)
    output = engine(input_ids=tokens, labels=tokens)
    return output.logits, list(output.keys()), len(output.to_tuple()), said.getvalue()


def test_an_output_without_logits_has_none_by_name_and_by_number() -> None:
    logits, names, count, said = run_workers(_read, 1)[0]
    assert logits is None and names == ["loss"] and count == 1
    assert "tiled_loss: in training, the model's output has no logits (None)" in said


def _without_labels() -> str:
    join()
    config = {**config_of(1, {}), "activation_checkpointing": {"tiled_loss": True}}
    engine, *_ = zlaunch.initialize(model=make("llama", "eager").train(), config=config)
    with redirect_stdout(io.StringIO()) as said:
        for _ in range(2):
            engine(input_ids=torch.full((2, 4), 5))
    return said.getvalue()


def test_a_loss_of_logits_is_said_not_to_be_tiled() -> None:
    (said,) = run_workers(_without_labels, 1)
    assert said.count("tiled_loss has no effect without labels") == 1


class Activations(TorchDispatchMode):
    """Counts the bytes that operations allocate while it is on: their most at one time.

    What exists before is not counted, nor what has the shape of a parameter or of its transpose: gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        self.gradients = {*shapes, *(shape[::-1] for shape in shapes)}
        self.known = {each.untyped_storage()._cdata for each in gc.get_objects() if type(each) in _KINDS}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self._count(each)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        if tuple(tensor.shape) in self.gradients:
            nbytes = 0
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


_KINDS = (Tensor, nn.Parameter)
_LONG = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 128, "max_position_embeddings": 512}


def _peak(parallel: dict[str, int], section: dict[str, Any]) -> tuple[int, float]:
    """Return the most bytes of activations in one step, and its loss."""
    join()
    model = make("llama", "sdpa", **_LONG, use_cache=False).train()
    config = {**config_of(0, parallel), "activation_checkpointing": section}
    engine, *_ = zlaunch.initialize(model=model, config=config)
    tokens = torch.randint(3, 512, (2, 384), generator=torch.Generator().manual_seed(5))
    for _ in range(2):  # the first pass allocates what is kept
        gc.collect()
        with Activations(model) as activations:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        engine.step()
    return activations.peak, loss.item()


@pytest.mark.rotated
def test_memory_of_long_sequences_is_a_third() -> None:
    (plain, wanted), *_ = run_workers(_peak, 1, {}, {})
    every = {"tiled_mlp": True, "tiled_loss": True, "tile_tokens": 64, "enabled": True}
    for peak, loss in run_workers(_peak, 2, {"sequence": 2}, every):
        assert loss == pytest.approx(wanted, abs=TOLERANCE)
        assert 0 < 3 * peak <= plain, (peak, plain)
