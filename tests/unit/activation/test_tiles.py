"""Test how many tokens a tile has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zlaunch.runtime.activation.tiles import tiled, tiled_cross_entropy


@pytest.mark.parametrize(
    ("batch", "tile", "lengths"),
    [
        (1, 4, [4, 4, 2]),
        (2, 8, [4, 4, 2]),
        (4, 4, [1] * 10),
        (4, 1, [1] * 10),
        (2, 20, [10]),
        (2, 19, [9, 1]),
    ],
)
def test_a_tile_counts_the_tokens_of_all_sequences(batch: int, tile: int, lengths: list[int]) -> None:
    seen: list[int] = []

    def double(tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        assert tokens.shape[0] == batch and (
            len(lengths) == 1 or tokens.shape[0] * tokens.shape[1] <= max(tile, batch)
        )
        return tokens * 2

    tokens = torch.randn(batch, 10, 3, requires_grad=True)
    assert torch.equal(tiled(double, tokens, tile), tokens * 2)
    assert seen == lengths
    seen.clear()
    loss = tiled_cross_entropy(double, tokens, torch.zeros(batch, 10, dtype=torch.int64), tile)
    assert loss.shape == () and seen == lengths


def test_without_gradients_there_is_one_tile() -> None:
    seen: list[int] = []

    def same(tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return tokens

    with torch.no_grad():
        tiled(same, torch.randn(1, 10, 3), 2)
    assert seen == [10]
