"""Test packed rows and batches by tokens: they train like samples that are computed one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

import zlaunch
from tests.needs import needs_package
from tests.runtime import model_parallel
from tests.runtime.workers import join, run_workers
from zlaunch.data import PackingCollator, TokenBatchSampler

IGNORED = -100
ROW, TOLERANCE = 24, 1e-9


def _samples(count: int = 9) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(5)
    return [torch.randint(3, 64, (3 + 2 * index,), generator=numbers) for index in range(count)]


# -- rows


def test_rows_hold_every_sample_once_and_apart() -> None:
    samples = _samples()
    rows = PackingCollator(ROW, pad_token_id=1)([{"input_ids": each.tolist()} for each in samples])
    assert {each.dtype for name, each in rows.items() if name != "attention_mask"} == {torch.int64}
    found = []
    for row in range(len(rows["input_ids"])):
        begins = (rows["position_ids"][row] == 0).nonzero().flatten().tolist()
        for begin, end in itertools.pairwise([*begins, ROW]):
            length = end - begin
            if rows["labels"][row, begin:].unique().tolist() == [IGNORED]:
                assert rows["input_ids"][row, begin:].unique().tolist() == [1], "what fills up the row"
                assert (rows["attention_mask"][row, 0, begin:, :begin] == -torch.inf).all()
                break
            assert rows["position_ids"][row, begin:end].tolist() == list(range(length))
            mask = rows["attention_mask"][row, 0, begin:end]
            lower = torch.full((length, length), -torch.inf).triu(1)
            assert mask[:, begin:end].equal(lower)
            assert (mask == 0).sum() == length * (length + 1) // 2, "nothing outside of the sample"
            tokens, labels = rows["input_ids"][row, begin:end], rows["labels"][row, begin:end]
            assert labels[0] == IGNORED
            assert labels[1:].equal(tokens[1:])
            found.append(tokens.tolist())
    assert sorted(found) == sorted(each.tolist() for each in samples)
    assert rows["num_tokens"] == sum(len(each) - 1 for each in samples)


def test_labels_of_the_samples_are_kept() -> None:
    sample = {"input_ids": torch.arange(5, 9), "labels": torch.tensor([IGNORED, IGNORED, 7, 8])}
    rows = PackingCollator(6, mask_dtype=None)([sample])
    assert rows["labels"].tolist() == [[IGNORED, IGNORED, 7, 8, IGNORED, IGNORED]]
    assert rows["num_tokens"] == 2
    assert "attention_mask" not in rows


def test_padding_of_the_tokenizer_is_left_out() -> None:
    samples = [{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}, {"input_ids": [7, 8, 9]}]
    rows = PackingCollator(6)(samples)
    assert rows["input_ids"].tolist() == [[7, 8, 9, 5, 6, 0]]
    assert rows["position_ids"].max() == 2, "models may have few positions"
    assert rows["num_tokens"] == 3


def test_what_does_not_fit_is_refused_by_name() -> None:
    collator = PackingCollator(4)
    wrong: list[tuple[Any, str]] = [
        ([[1, 2], [1, 2, 3, 4, 5]], r"sample 1 has 5 tokens, but a row has 4 \(max_tokens\): truncate it"),
        ([[]], "a sample has no tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 tokens and 1 labels"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "2 tokens, but 1 in attention_mask"),
        ([{"tokens": [1, 2]}], "no input_ids, but 'tokens'"),
        ([(torch.ones(2),)], "a sample is a tuple"),
        ([[1.5, 2.0]], "expected a list of whole numbers, got torch.float32"),
        ([[[1, 2], [3, 4]]], r"of shape \[2, 2\]"),
    ]
    for samples, message in wrong:
        with pytest.raises(ValueError, match=message):
            collator(samples)
    for lengths, message in (([1, 9], "sample 1 has 9 tokens"), ([0], "sample 0 has 0 tokens")):
        for packed in (True, False):
            with pytest.raises(ValueError, match=message):
                TokenBatchSampler(lengths, 4, packed=packed)
    for dtype in (torch.bool, "float32"):
        with pytest.raises(TypeError, match="mask_dtype"):
            PackingCollator(4, mask_dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pad_token_id is None"):
        PackingCollator(4, pad_token_id=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths: expected a list of whole numbers"):
        TokenBatchSampler([1.5], 4)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="seed is 'a'"):
        TokenBatchSampler([1], 4, seed="a")  # type: ignore[arg-type]
    for tokens in (0, True, 1.5):
        with pytest.raises(ValueError, match="max_tokens"):
            PackingCollator(tokens)  # type: ignore[arg-type]


# -- batches


@given(st.lists(st.integers(1, 40), max_size=200), st.integers(40, 90), st.booleans(), st.integers(0, 3))
def test_batches_have_every_sample_once_and_fit(
    lengths: list[int], max_tokens: int, packed: bool, epoch: int
) -> None:
    sampler = TokenBatchSampler(lengths, max_tokens, packed=packed, seed=epoch)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        own = [lengths[index] for index in batch]
        assert (sum(own) if packed else len(own) * max(own)) <= max_tokens
    if packed:
        half_empty = [batch for batch in batches if sum(lengths[index] for index in batch) * 2 <= max_tokens]
        assert len(half_empty) <= 1, "two of them would fit into one row"
    assert list(sampler) == batches, "an epoch has one order"


def test_epochs_have_other_orders_of_the_same_batches() -> None:
    sampler = TokenBatchSampler(list(range(1, 30)), 30)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    assert sorted(first) == sorted(second)
    plain = TokenBatchSampler(list(range(1, 30)), 30, shuffle=False)
    plain.set_epoch(3)
    assert list(plain) == list(TokenBatchSampler(list(range(1, 30)), 30, shuffle=False))


# -- training


def _losses_one_by_one(model: Any, samples: list[Tensor]) -> Tensor:
    """Return the mean over all predicted tokens, each sample by itself."""
    sums = [
        torch.nn.functional.cross_entropy(
            model(input_ids=each.unsqueeze(0)).logits[0, :-1], each[1:], reduction="sum"
        )
        for each in samples
    ]
    return torch.stack(sums).sum() / sum(len(each) - 1 for each in samples)


def _compare_with_samples_one_by_one(family: str, attention: str, mask: bool) -> tuple[float, float]:
    join()
    model = model_parallel.make(family, attention)
    model.config.use_cache = mask  # a cache is created in training as well, and must do no harm
    wanted = _losses_one_by_one(model, _samples())
    wanted.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    rows = PackingCollator(ROW, mask_dtype=torch.float64 if mask else None)(_samples())
    del rows["num_tokens"]
    loss = model(**rows).loss
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    return abs(loss.item() - wanted.item()), model_parallel.distance(found, gradients)


@needs_package("transformers")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "attention", "mask"),
    [
        ("llama", "sdpa", False),
        ("gpt2", "eager", True),
        ("qwen3", "eager", False),
        ("llama", "sdpa", True),
        ("gpt2", "sdpa", True),
    ],
)
def test_packed_rows_have_the_loss_and_gradients_of_the_samples(
    family: str, attention: str, mask: bool
) -> None:
    for errors in run_workers(_compare_with_samples_one_by_one, 1, family, attention, mask):
        assert max(errors) < TOLERANCE


def _train_packed() -> float:
    """Return the error of the weights after an epoch of packed micro-batches of two ranks."""
    join()
    samples = _samples(8)
    lengths = [len(each) for each in samples]
    sampler = TokenBatchSampler(lengths, ROW, shuffle=False)
    settings = model_parallel.settings(
        2, 1, 2, parallel={}, loss_reduction="tokens", gradient_clipping=0.0, data_loader={"num_workers": 0}
    )
    engine, *_ = zlaunch.initialize(
        model=model_parallel.make("llama", "sdpa"),
        config={**settings, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
        | {"gradient_accumulation_steps": 2},
    )
    loader = engine.dataloader(
        DataLoader(samples, batch_sampler=sampler, collate_fn=PackingCollator(ROW, mask_dtype=torch.float64))  # type: ignore[arg-type]
    )
    for _ in range(len(loader) // 2):
        engine.train_batch()
    plain = model_parallel.make("llama", "sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, eps=model_parallel.EPS)
    batches = list(sampler)
    for step in range(len(loader) // 2):
        own = [samples[index] for batch in batches[4 * step : 4 * step + 4] for index in batch]
        _losses_one_by_one(plain, own).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps > 0
    return model_parallel.distance(engine.module.state_dict(), plain.state_dict())


@needs_package("transformers")
def test_packed_micro_batches_train_as_their_samples_do_in_one_process() -> None:
    assert max(run_workers(_train_packed, 2)) < TOLERANCE
