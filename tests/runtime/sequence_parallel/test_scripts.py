"""Test models of a script's own that divide sequences by ``zlaunch.sequence``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.sequence import attention, mean, split, total

CONFIG: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
DIVIDED = {**CONFIG, "parallel": {"sequence": 2}}


class Attention(nn.Module):
    def __init__(self, calls: bool = True) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), calls

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.inner(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        function = attention if self.calls else functional.scaled_dot_product_attention
        found: Tensor = function(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return found


def _sums() -> tuple[float, float, list[float]]:
    join()
    engine, *_ = zlaunch.initialize(model=Attention().double(), config=DIVIDED)
    values = torch.arange(6.0).view(1, 6)
    own = split(values)
    counts = own > 1
    whole_mask = torch.ones(6, 6, dtype=torch.bool).tril()
    heads = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(1))
    part = attention(split(heads, 2), split(heads, 2), split(heads, 2), whole_mask)
    wanted = functional.scaled_dot_product_attention(heads, heads, heads, whole_mask)
    torch.testing.assert_close(part, split(wanted, 2))
    assert engine.data_parallel_size == 1
    return mean(own).item(), mean(own, counts).item(), [total(own.sum()).item()]


def test_sums_and_masks_are_of_whole_sequences() -> None:
    for found in run_workers(_sums, 2):
        assert found == (2.5, 3.5, [15.0])


def _said(kind: str) -> str:
    join()
    try:
        if kind == "early":
            split(torch.ones(2, 4, 8))
        engine, *_ = zlaunch.initialize(model=Attention(kind != "never"), config=DIVIDED)
        if kind == "two":
            zlaunch.initialize(model=Attention(), config=CONFIG | {"train_batch_size": 2})
        tokens = torch.ones(2, 5 if kind == "length" else 4, 8)
        heads = torch.ones(2, 3, 2, 4)
        if kind == "heads":
            attention(heads, heads, heads)
        if kind == "mask":
            attention(heads[:, :2], heads[:, :2], heads[:, :2], torch.ones(2, 2))
        engine(split(tokens))
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("early", "split was called, with a tensor [2, 4, 8], before zlaunch.initialize"),
        ("never", "Attention has not called zlaunch.sequence.attention"),
        ("two", "different parallel.sequence sizes"),
        ("length", "5 tokens cannot be divided by 2 ranks: pad sequences to a multiple of 2"),
        ("heads", "3 attention heads and 3 key-value heads cannot be divided by 2 ranks"),
        ("mask", "attn_mask is [2, 2], but attention runs on whole sequences of 4 tokens"),
    ],
)
def test_mistakes_are_named(kind: str, text: str) -> None:
    for said in run_workers(_said, 2, kind):
        assert text in said and said


def test_without_an_engine_all_is_as_torch_has_it() -> None:
    values = torch.arange(6.0).view(1, 6)
    assert split(values) is values and total(values) is values
    assert mean(values).item() == 2.5 and mean(values, values > 3).item() == 4.5
