"""Gives small modules that the cases put together.

A block has at least 4096 parameters, so that stage 3 shards it by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.matrix.train import VOCABULARY, WIDTH
from tests.runtime.models import Layer

__all__ = ["Layer", "Stack", "Tokens", "layers"]


def layers(count: int = 3, width: int = WIDTH) -> nn.ModuleList:
    """Give a list of blocks."""
    return nn.ModuleList(Layer(width) for _ in range(count))


class Stack(nn.Module):
    """Runs a list of blocks and a head; ``around`` says how a block is called."""

    def __init__(
        self,
        blocks: Any = None,
        around: Callable[[nn.Module, Tensor], Tensor] | None = None,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.layers: Any = blocks if blocks is not None else layers(width=width)
        self.head = nn.Linear(width, width)
        self.around = around

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = self.around(layer, x) if self.around is not None else layer(x)
        return self.head(x)


class Tokens(nn.Module):
    """Embeds tokens, runs blocks and gives logits."""

    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers: Any = layers(depth, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
