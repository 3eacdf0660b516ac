"""Test layers and losses that are computed in tiles of tokens on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zlaunch
from zlaunch.runtime.activation import tiles
from zlaunch.sequence import attention, mean, split

pytestmark = pytest.mark.gpu
WIDTH, WORDS, TOKENS, TILE = 32, 96, 64, 24


class Model(nn.Module):
    """Computes the loss of the next token, in tiles unless ``tile`` is 0."""

    def __init__(self, tile: int) -> None:
        super().__init__()
        self.tile = tile
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        hidden, wanted = self.words(text[:, :-1]), text[:, 1:]
        parts = self.inner(hidden).chunk(3, -1)
        query, key, value = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in parts)
        hidden = hidden + attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        layer: Callable[[Tensor], Tensor] = self.mlp
        tile = self.tile or 1 << 20
        hidden = hidden + zlaunch.checkpointing.tiled(layer, hidden, tile)
        return zlaunch.checkpointing.tiled_cross_entropy(self.head, hidden, wanted, tile) / wanted.numel()


def _text() -> Tensor:
    return torch.randint(0, WORDS, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))


def _computed(tile: int, device: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Model(tile).to(device)
    loss = model(_text().to(device))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.detach().cpu() for each in (loss, *gradients) if each is not None]


def test_tiles_compute_what_the_cpu_computes_whole() -> None:
    wanted = _computed(0, "cpu")
    for tile in (0, TILE):
        found = _computed(tile, "cuda")
        assert len(found) == len(wanted) == 10
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_tiles_train_with_offloaded_inputs(stage: int) -> None:
    section = {"tiled_mlp": True, "tile_tokens": TILE, "enabled": True, "cpu_checkpointing": True}
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": section,
    }

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.words(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            logits: Tensor = self.head(hidden)
            return logits

    engine, *_ = zlaunch.initialize(model=Blocks(), config=config)
    text = _text().to(engine.device)
    losses = []
    for _ in range(30):
        logits = engine(split(text[:, :-1])).float().flatten(0, 1)
        wanted = split(text[:, 1:]).flatten()
        loss = mean(nn.functional.cross_entropy(logits, wanted, reduction="none"))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.7 * losses[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = hidden + self.mlp(self.norm(hidden))
        return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_in_chunks_is_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHUNK_NUMEL", 5 * 96)
    targets = torch.arange(32, device="cuda") % 96
    targets[:3] = -100
    found: list[Any] = []
    for whole in (False, True):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(32, 96, generator=generator).to("cuda", dtype).requires_grad_()
        if whole:
            loss = functional.cross_entropy(logits.float(), targets, reduction="sum")
        else:
            loss = tiles.chunked_cross_entropy(logits, targets)
        loss.backward()
        found.append((loss.detach(), logits.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
