"""Test MLPs and losses that are computed in tiles of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional

import zlaunch
from zlaunch.runtime.activation.tiles import tile_mlps


@pytest.mark.parametrize("tile", [1, 3, 7, 100])
def test_tiles_are_the_whole(tile: int) -> None:
    torch.manual_seed(1)
    layer = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)).double()
    head = nn.Linear(4, 11).double()
    tokens = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (2, 7))
    targets[0, :3] = -100

    def gradients(loss: Tensor) -> list[Tensor]:
        wanted = [tokens, *layer.parameters(), *head.parameters()]
        return [loss.detach(), *torch.autograd.grad(loss, wanted)]

    plain = functional.cross_entropy(head(layer(tokens)).flatten(0, 1), targets.flatten())
    hidden = zlaunch.checkpointing.tiled(layer, tokens, tile)
    summed = zlaunch.checkpointing.tiled_cross_entropy(head, hidden, targets, tile)
    found = gradients(summed / (targets != -100).sum())
    for mine, other in zip(found, gradients(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def _peak(tile: int | None) -> int:
    """Return the most bytes of activations and gradients of them in a step of an MLP, a head and a loss."""
    torch.manual_seed(1)
    up, down, words = (nn.Parameter(torch.randn(*shape)) for shape in ((64, 16), (16, 64), (512, 16)))

    def layer(tokens: Tensor) -> Tensor:
        return functional.linear(functional.gelu(functional.linear(tokens, up)), down)

    def head(hidden: Tensor) -> Tensor:
        return functional.linear(hidden, words)

    tokens, targets = torch.randn(1, 512, 16), torch.zeros(1, 512, dtype=torch.long)
    tracker: Any = MemTracker()
    tracker.track_external(up, down, words, tokens, targets)
    with tracker:
        if tile is None:
            hidden = layer(tokens)
            functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten()).backward()
        else:
            hidden = zlaunch.checkpointing.tiled(layer, tokens, tile)
            zlaunch.checkpointing.tiled_cross_entropy(head, hidden, targets, tile).backward()
    return sum(
        int(nbytes)
        for of_device in tracker.get_tracker_snapshot("peak").values()
        for kind, nbytes in of_device.items()
        if str(kind).rpartition(".")[2] not in ("PARAM", "BUFFER", "Total", "INP")
    )


def test_memory_is_that_of_a_tile() -> None:
    assert _peak(32) * 3 < _peak(None)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Bilinear(3, 3, 3)
        self.ffn = nn.Sequential(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ffn(x)
        return found


def test_only_modules_of_linear_layers_are_tiled() -> None:
    model = _Two()
    tile_mlps(model, 2)
    assert "forward" in model.ffn.__dict__ and "forward" not in model.mlp.__dict__
    x = torch.randn(1, 5, 3)
    wanted = model.ffn[0](x)
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(zlaunch.ParameterError, match="ffn must take one tensor"):
        model(x[0])
    torch.testing.assert_close(model.eval()(x[0]), wanted[0])
