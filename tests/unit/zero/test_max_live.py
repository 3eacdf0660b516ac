"""Test how many elements may be unsharded at one time, by the config and the model's blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zlaunch.runtime.build import _choose_max_live
from zlaunch.runtime.config.load import load
from zlaunch.runtime.config.resolve import resolve
from zlaunch.runtime.zero.policy import Block

LAYER = 856_000_000
"""Elements of a layer of a Llama with 70 billion."""


def chosen(limit: Any, *, ranks: int = 2, prefetch: int = 50_000_000) -> int:
    """Return the limit for a model of large layers, without memory of its parameters."""
    zero: dict[str, Any] = {"stage": 3, "stage3_prefetch_bucket_size": prefetch}
    if limit is not None:
        zero["stage3_max_live_parameters"] = limit
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    blocks = [
        Block(at, name, [], [(name, nn.Parameter(torch.empty(numel, device="meta")))], is_root=at == 0)
        for at, (name, numel) in enumerate([("root", 1000), ("0", LAYER), ("1", LAYER), ("norm", 8192)])
    ]
    comm: Any = SimpleNamespace(world_size=ranks, rank=0)
    return _choose_max_live(resolve(load(config), world_size=ranks), blocks, comm)


@pytest.mark.parametrize("limit", [None, "auto"])
def test_the_default_holds_a_block_and_what_is_gathered_ahead(
    limit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(limit) == 1000 + 2 * LAYER + 50_000_000
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("limit", [30_000_000, 1_000_000_000])
def test_a_limit_that_keeps_blocks_from_being_gathered_ahead_is_kept_and_said(
    limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(limit) == limit
    said = capsys.readouterr().out
    assert f"zero_optimization.stage3_max_live_parameters: {limit} elements" in said
    assert f"at least {2 * LAYER}" in said


@pytest.mark.parametrize(
    "options",
    [{"limit": 2 * LAYER}, {"limit": 0}, {"limit": 10**9, "ranks": 1}, {"limit": 10**9, "prefetch": 0}],
)
def test_nothing_is_said_where_a_limit_costs_nothing_or_is_meant(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(**options) == options["limit"]
    assert capsys.readouterr().out == ""
