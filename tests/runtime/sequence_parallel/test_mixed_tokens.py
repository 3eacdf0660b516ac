"""Test that a script's model which mixes tokens by itself, on parts of sequences, is told so."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import torch
from torch import Tensor, nn
from torch.nn import functional

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.sequence import attention, mean, split


class _Mixer(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.linear, self.conv, self.mixes = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, padding=1), mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x).unflatten(-1, (2, 2)).transpose(1, 2)
        found = attention(hidden, hidden, hidden, is_causal=True)
        if self.mixes:
            found = found + functional.scaled_dot_product_attention(hidden, hidden, hidden)
        found = found.transpose(1, 2).flatten(2)
        return found + self.conv(x.transpose(1, 2)).transpose(1, 2) if self.mixes else found


def _said(mixes: bool) -> str:
    join()
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "parallel": {"sequence": 2},
    }
    with redirect_stdout(io.StringIO()) as said:
        engine, *_ = zlaunch.initialize(model=_Mixer(mixes), config=config)
        for _ in range(2):
            engine.backward(mean(engine(split(torch.ones(2, 6, 4))).square()))
            engine.step()
    return said.getvalue()


def test_operations_that_mix_tokens_are_named_once() -> None:
    said, _ = run_workers(_said, 2, True)
    assert said.count("the model calls scaled_dot_product_attention, conv1d") == 1, said
    plain, _ = run_workers(_said, 2, False)
    assert "the model calls" not in plain
