"""Test the loss where each rank has the logits of other words, computed in chunks and at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import config_of, data, make
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.activation import tiles
from zlaunch.runtime.parallel.vocabulary_loss import VocabularyLoss

ROWS = 10
WORDS = 12


def _targets() -> Tensor:
    targets = torch.arange(ROWS) * 5 % WORDS
    targets[[0, 7]] = tiles.IGNORED
    return targets


def _loss_of_shards(axis: Any, shard: Tensor, *, chunked: bool, items: Any) -> Tensor:
    loss = VocabularyLoss(axis, WORDS, chunked=chunked)
    return loss(shard.view(2, ROWS // 2, -1), None, WORDS, items, shift_labels=_targets().view(2, -1))


def _axis() -> Any:
    engine, *_ = zlaunch.initialize(model=make("llama"), config=config_of(0, {"tensor": 2}))
    return engine.comm.axes["tensor"]


def _chunk_all() -> None:
    """Compute this worker's losses in chunks, of float64 too."""
    tiles.CHUNK_NUMEL = 3 * WORDS // 2
    tiles._NARROW = (torch.bfloat16, torch.float16, torch.float64)  # type: ignore[assignment]  # for this test


def _compare(dtype: torch.dtype) -> None:
    _chunk_all()
    rank = join()
    axis = _axis()
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, WORDS, dtype=torch.float64) * 5).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for items in (None, 5, torch.tensor(7)):
        whole = logits.double().requires_grad_()
        count = (_targets() != tiles.IGNORED).sum() if items is None else items
        wanted = functional.cross_entropy(whole, _targets(), reduction="sum") / count
        (gradient,) = torch.autograd.grad(3 * wanted, whole)
        expected = gradient.chunk(2, 1)[rank]
        for chunked in (False, True):
            shard = logits.chunk(2, 1)[rank].contiguous().requires_grad_()
            loss = _loss_of_shards(axis, shard, chunked=chunked, items=items)
            assert ("_CrossEntropy" in repr(loss.grad_fn.next_functions)) == chunked  # type: ignore[union-attr]  # it has one
            (found,) = torch.autograd.grad(3 * loss, shard)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12 if dtype == torch.float64 else 1e-6)
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 10)


@needs_package("transformers")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_loss_and_its_gradient_are_those_of_all_words(dtype: torch.dtype) -> None:
    run_workers(_compare, 2, dtype)


def _differentiate_twice() -> None:
    _chunk_all()
    rank = join()
    axis = _axis()
    torch.manual_seed(0)
    logits = torch.randn(ROWS, WORDS, dtype=torch.float64)
    whole = logits.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(functional.cross_entropy(whole, _targets()), whole)
    found = []
    for chunked in (False, True):
        shard = logits.chunk(2, 1)[rank].contiguous().requires_grad_()
        loss = _loss_of_shards(axis, shard, chunked=chunked, items=None)
        (once,) = torch.autograd.grad(loss, shard, create_graph=True)
        torch.testing.assert_close(once, wanted.chunk(2, 1)[rank])
        found.append(torch.autograd.grad(once.square().sum(), shard)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert found[0].abs().max() > 0


@needs_package("transformers")
def test_gradients_can_be_differentiated_as_at_once() -> None:
    run_workers(_differentiate_twice, 2)


def _refuse() -> list[str]:
    join()
    axis = _axis()
    said = []
    for chunked in (False, True):
        loss = VocabularyLoss(axis, WORDS, chunked=chunked)
        try:
            loss(torch.zeros(1, 3, 6), torch.zeros(1, 5, dtype=torch.int64), WORDS)
        except ValueError as error:
            said.append(str(error))
    return said


@needs_package("transformers")
def test_other_numbers_of_labels_than_logits_are_refused() -> None:
    assert run_workers(_refuse, 2) == [["5 labels for 3 rows of logits"] * 2] * 2


def _other_heads() -> list[str]:
    join()
    said = []
    for words, plan in ((63, None), (64, {"lm_head": "rowwise_split_input"})):
        section = {"vocab_parallel_loss": True, "plan": plan}
        config = {**config_of(0, {"tensor": 2}), "tensor_parallel": section}
        try:
            zlaunch.initialize(model=make("llama", vocab_size=words), config=config)
        except zlaunch.ZlaunchError as error:
            said.append(str(error))
    return said


@needs_package("transformers")
def test_heads_that_are_not_sharded_by_columns_are_refused() -> None:
    for said in run_workers(_other_heads, 2):
        assert "lm_head has 63 words, which cannot be divided by 2: pad the vocabulary" in said[0]
        assert "whose plan shards the head by columns" in said[1]


def _evaluate() -> tuple[Any, Any, list[str]]:
    join()
    plain = make("llama").eval()
    batch = data()[0][:2]
    config = {**config_of(0, {"tensor": 2}), "tensor_parallel": {"vocab_parallel_loss": True}}
    engine, *_ = zlaunch.initialize(model=make("llama"), config=config)
    said = []
    module: Any = engine.module
    for call in (lambda: engine(input_ids=batch), lambda: module.lm_head(module.model(batch)[0])):
        try:
            call()
        except zlaunch.ZlaunchError as error:
            said.append(str(error))
    engine(input_ids=batch, labels=batch)
    engine.eval()
    with torch.no_grad():
        found = engine(input_ids=batch, labels=batch)
        wanted = plain(input_ids=batch, labels=batch)
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close(found.loss, wanted.loss)
    options = {"input_ids": batch[:, :4], "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    return module.generate(**options).tolist(), plain.generate(**options).tolist(), said


@needs_package("transformers")
def test_evaluation_has_all_logits_and_training_needs_labels() -> None:
    for found, wanted, said in run_workers(_evaluate, 2):
        assert found == wanted
        assert len(said) == 2
        assert "vocab_parallel_loss: in training" in said[0] and "give it labels" in said[0]
        assert "lm_head is called by itself in training" in said[1]
