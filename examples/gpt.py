"""Define a byte-level GPT in plain torch, and load its text: the Python standard library's sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": Size(layers=4, width=128, heads=4, context=128),
    "small": Size(layers=6, width=384, heads=6, context=256),
    "medium": Size(layers=12, width=768, heads=12, context=512),
    "large": Size(layers=24, width=1024, heads=16, context=1024),
    "xl": Size(layers=48, width=1600, heads=25, context=1024),
}


Attention = Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.head_width = size.width // size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, _ = x.shape
        # one head after the other, as many as there are: ranks that share the layer have some of them
        qkv = self.qkv(self.norm1(x)).view(batch, time, -1, 3, self.head_width)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (batch, heads, time, head_width) each
        y = self.attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """``attention`` is torch's scaled_dot_product_attention, or another function that is called like it."""

    def __init__(
        self, size: Size, vocabulary: int = 256, attention: Attention = F.scaled_dot_product_attention
    ) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, vocabulary) for ``tokens`` (batch, time) at ``positions`` (time)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of predicting each byte of ``text`` (batch, time + 1)."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


def load_text(limit_bytes: int = 8_000_000) -> tuple[Tensor, Tensor]:
    """Return training and validation bytes (int64); every twentieth file is for validation."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = 0
    for index, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        content = path.read_bytes()
        parts[index % 20 == 0].append(content)
        total += len(content)
        if total > limit_bytes:
            break
    train, validation = (b"".join(parts[kind]) for kind in (False, True))
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in (train, validation))  # type: ignore[return-value]


def sample_batch(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` random windows of ``context + 1`` bytes."""
    starts = torch.randint(0, len(text) - context - 1, (count,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()])
