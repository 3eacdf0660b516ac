"""Test the loss of a Hugging Face model in chunks of logits."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.nn import functional

import zlaunch
from tests.needs import needs_package
from tests.runtime.sequence_parallel.test_tiles import Activations
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.activation import tiles
from zlaunch.runtime.activation.tiles import (
    ChunkedLoss,
    changes_logits,
    chunk_loss,
    chunked_cross_entropy,
)

VOCAB = 96


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_NUMEL", 3 * VOCAB)
    # to compare digits; training takes chunks of 16-bit logits alone
    monkeypatch.setattr(tiles, "_NARROW", (torch.bfloat16, torch.float16, torch.float64))


@given(st.integers(1, 13), st.integers(2, VOCAB), st.integers(0, 3), st.floats(0.1, 50.0))
def test_the_loss_and_its_gradient_are_torchs(n: int, vocab: int, ignored: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(n * vocab + ignored)
    logits = (torch.randn(n, vocab, generator=generator, dtype=torch.float64) * scale).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=generator)
    targets[:ignored] = -100
    found: list[Any] = []
    for function in (chunked_cross_entropy, _whole):
        logits.grad = None
        total = function(logits, targets)
        (total * 0.5).backward()
        assert logits.grad is not None
        found.append((total.detach(), logits.grad.clone()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def _whole(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, targets, reduction="sum")


@needs_package("transformers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("items", [None, 9, torch.tensor(7)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_it_is_transformers_loss(dtype: torch.dtype, items: Any, is_shifted: bool) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 9, VOCAB, generator=generator).to(dtype)[:, 1:].detach()
    if dtype == torch.float32:  # transformers takes no others; its copies of 16 bits are
        logits = logits.contiguous()
    logits.requires_grad_()
    labels = torch.randint(0, VOCAB, (2, 8), generator=generator)
    labels[0, :3] = -100
    more: dict[str, Any] = {"shift_labels": labels} if is_shifted else {}
    found: list[Any] = []
    functions: list[Any] = [ChunkedLoss(_llama(), ForCausalLMLoss), ForCausalLMLoss]
    for function in functions:
        logits.grad = None
        loss = function(
            logits, None if is_shifted else labels, VOCAB, num_items_in_batch=items, unknown=1, **more
        )
        loss.backward()
        assert logits.grad is not None
        found.append((loss.detach(), logits.grad.clone()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


def test_no_label_that_counts_makes_nan_as_torch_has_it() -> None:
    logits = torch.randn(8, VOCAB).bfloat16()
    total = chunked_cross_entropy(logits, torch.full((8,), -100))
    assert total == 0 and (total / 0).isnan()


def _own(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(7.0)


def test_its_gradient_can_be_differentiated() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, VOCAB, (8,), generator=generator)
    targets[0] = -100
    found: list[Any] = []
    for function in (chunked_cross_entropy, _whole):
        (first,) = torch.autograd.grad(function(logits, targets), logits, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits)
        found.append((first.detach(), second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **{"vocab_size": VOCAB, **changes}))


@needs_package("transformers")
def test_only_transformers_own_causal_loss_is_replaced() -> None:
    from transformers import BertConfig, BertForMaskedLM

    model = _llama()
    own: Callable[..., Any] = model.loss_function
    chunk_loss(model)
    assert isinstance(model.loss_function, ChunkedLoss) and model.loss_function.whole is own
    chunk_loss(model)
    assert not isinstance(model.loss_function.whole, ChunkedLoss)
    assert isinstance(copy.deepcopy(model).loss_function, ChunkedLoss)
    kept = pickle.loads(pickle.dumps(model.loss_function))
    assert b"zlaunch" not in pickle.dumps(model.loss_function) and kept.func is own
    other = _llama()
    other.loss_function = _own
    chunk_loss(other)
    assert other.loss_function is _own
    masked = BertForMaskedLM(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    before = masked.loss_function
    chunk_loss(masked)
    chunk_loss(torch.nn.Linear(1, 1))
    chunk_loss(None)
    assert masked.loss_function is before


@needs_package("transformers")
def test_models_that_change_their_logits_are_known() -> None:
    import transformers

    def changes(name: str) -> bool:
        model = object.__new__(getattr(transformers, name))
        return changes_logits(model)

    found = {name: changes(f"{name}ForCausalLM") for name in ("Llama", "Qwen3", "Mistral", "Mixtral", "OPT")}
    assert not any(found.values()), found
    found = {name: changes(f"{name}ForCausalLM") for name in ("Gemma2", "Cohere", "Granite")}
    assert all(found.values()), found


@needs_package("transformers")
def test_what_the_script_or_another_library_changes_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.loss import loss_utils

    model = _llama()
    chunk_loss(model)
    logits = torch.randn(1, 16, VOCAB).bfloat16()
    labels = torch.zeros(1, 16, dtype=torch.int64)

    def loss() -> float:
        return float(model.loss_function(logits, labels, VOCAB))

    plain = loss()
    with monkeypatch.context() as patch:
        patch.setattr(loss_utils, "fixed_cross_entropy", _own)
        assert loss() == 7.0
    with monkeypatch.context() as patch:
        patch.setattr(functional, "cross_entropy", _own)
        assert loss() == 7.0
    with monkeypatch.context() as patch:
        patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", _own)
        assert loss() == 7.0
    with monkeypatch.context() as patch:
        patch.setitem(loss_utils.LOSS_MAPPING, "Own", _own)
        patch.setattr(model, "loss_type", "Own")
        assert loss() == 7.0
        copied = copy.deepcopy(model)
        copied.loss_type = "ForCausalLM"
        assert loss() == 7.0 and float(copied.loss_function(logits, labels, VOCAB)) == plain
    assert loss() == plain


@needs_package("transformers")
def test_it_is_undone_where_a_config_does_not_want_it() -> None:
    model = _llama()
    own: Any = model.loss_function
    chunk_loss(model)
    chunk_loss(model, wanted=False)
    assert model.loss_function is own
    model.loss_function = pickle.loads(pickle.dumps(ChunkedLoss(model, own)))
    chunk_loss(model)
    assert isinstance(model.loss_function, ChunkedLoss), "of a model that was pickled"


@pytest.mark.parametrize("rows", [3, 6, 9, 12])
def test_other_numbers_of_labels_than_logits_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"8 labels for {rows} rows of logits"):
        chunked_cross_entropy(torch.randn(rows, VOCAB).bfloat16(), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize("word", [VOCAB, -1])
@pytest.mark.parametrize("rows", [2, 8], ids=["whole", "chunks"])
def test_a_target_that_is_no_word_is_torchs_error(rows: int, word: int) -> None:
    targets = torch.zeros(rows, dtype=torch.int64)
    targets[1] = word
    with pytest.raises(IndexError, match=f"^Target {word} is out of bounds"):
        chunked_cross_entropy(torch.randn(rows, VOCAB).bfloat16(), targets)


def test_logits_that_are_changed_before_the_backward_pass_are_an_error_with_advice() -> None:
    logits = torch.randn(8, VOCAB).bfloat16().requires_grad_()
    output = logits * 1
    loss = chunked_cross_entropy(output, torch.zeros(8, dtype=torch.int64))
    output.detach().div_(2)
    with pytest.raises(RuntimeError, match=r"activation_checkpointing\.chunked_loss to false"):
        loss.backward()


def test_functions_of_torch_func_and_compilers_get_torchs_operations() -> None:
    logits = torch.randn(8, VOCAB).bfloat16()
    targets = torch.arange(8)
    wanted = torch.func.grad(lambda x: functional.cross_entropy(x.float(), targets, reduction="sum"))(logits)
    found = torch.func.grad(lambda x: chunked_cross_entropy(x, targets))(logits)
    assert torch.equal(found, wanted)
    compiled = torch.compile(chunked_cross_entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, targets), chunked_cross_entropy(logits, targets))


def test_forward_mode_and_several_gradients_at_once_are_torchs() -> None:
    logits = torch.randn(8, VOCAB).double().requires_grad_()
    targets = torch.arange(8)
    several = torch.tensor([1.0, -2.0], dtype=torch.float64)
    wanted = torch.autograd.grad(_whole(logits, targets), logits, several[0])[0]
    (found,) = torch.autograd.grad(
        chunked_cross_entropy(logits, targets), logits, several, is_grads_batched=True
    )
    torch.testing.assert_close(found, torch.stack([wanted, -2 * wanted]))
    tangent = torch.randn(8, VOCAB).double()
    with forward_ad.dual_level():
        loss = chunked_cross_entropy(forward_ad.make_dual(logits.detach(), tangent), targets)
        slope = forward_ad.unpack_dual(loss).tangent
    torch.testing.assert_close(slope, (wanted * tangent).sum())


def _train(stage: int, tensor: int, is_chunked: bool) -> tuple[list[float], int]:
    """Return the losses of three steps in bf16, and the most bytes of activations."""
    join()
    tiles.CHUNK_NUMEL = 16 * 2048
    model = _llama(vocab_size=2048, tie_word_embeddings=True).train()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {"chunked_loss": is_chunked},
        "parallel": {"tensor": tensor},
        "tensor_parallel": {"vocab_parallel_loss": tensor > 1},
    }
    engine, *_ = zlaunch.initialize(model=model, config=config)
    tokens = torch.randint(0, 2048, (2, 256), generator=torch.Generator().manual_seed(5))
    losses = []
    peak = 0
    for _ in range(3):
        gc.collect()
        with Activations(model) as activations:
            output = engine(input_ids=tokens, labels=tokens)
            engine.backward(output.loss)
        assert output.logits.shape == (2, 256, 2048 // tensor), "the output has them all the same"
        losses.append(output.loss.item())
        engine.step()
        peak = activations.peak
        del output
    return losses, peak


@needs_package("transformers")
@pytest.mark.parametrize(("stage", "tensor"), [(0, 1), (3, 1), (0, 2)])
def test_training_is_the_same_with_less_memory(stage: int, tensor: int) -> None:
    wanted, whole = run_workers(_train, 2, stage, tensor, False)[0]
    for losses, peak in run_workers(_train, 2, stage, tensor, True):
        # ranks join their sums in another way, so some gradients are rounded to other bf16 numbers
        assert losses == pytest.approx(wanted, rel=1e-6 if tensor == 1 else 1e-4)
        assert peak < 0.5 * whole, (peak, whole)
