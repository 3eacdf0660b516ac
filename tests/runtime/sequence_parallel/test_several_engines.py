"""Test several engines in one process, with different sizes of ``parallel.sequence``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch import sequence

STEPS, TOLERANCE = 3, 1e-12
SIZES = (2, 1, 2)


class _Model(nn.Module):
    """Computes its loss itself: outside of its forward nobody knows which engine is meant."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.is_plain = is_plain

    def _attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        heads = layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
        attend = functional.scaled_dot_product_attention if self.is_plain else sequence.attention
        return x + attend(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        target = x.roll(1, -1)
        if not self.is_plain:
            x, target = sequence.split(x), sequence.split(target)
        for layer in self.layers:
            # which attends again in the backward pass
            x = checkpoint(self._attend, layer, x, use_reentrant=False)
        losses = (x - target).square().mean(-1)
        return losses.mean() if self.is_plain else sequence.mean(losses)


def _model(seed: int, *, is_plain: bool) -> _Model:
    torch.manual_seed(seed)
    return _Model(is_plain).double()


def _data(step: int) -> Tensor:
    return torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _train_in_turn() -> tuple[float, str, bool]:
    rank = join()
    engines: list[Any] = []
    for seed, size in enumerate(SIZES):
        config: dict[str, Any] = {
            "train_batch_size": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "parallel": {"sequence": size},
        }
        engines.append(zlaunch.initialize(model=_model(seed, is_plain=False), config=config)[0])
    for step in range(STEPS):
        for engine, size in zip(engines, SIZES, strict=True):
            whole = _data(step)
            engine.backward(engine(whole if size == 2 else whole[rank : rank + 1]))
            engine.step()
    error = 0.0
    for seed, engine in enumerate(engines):
        plain = _model(seed, is_plain=True)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(STEPS):
            plain(_data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        error = max(error, *((p - q).abs().max().item() for p, q in pairs))
    said = ""
    try:
        sequence.split(_data(0))
    except zlaunch.ZlaunchError as refused:
        said = str(refused)
    engines[1].destroy()  # all others have one size, so each is meant
    return error, said, sequence.split(_data(0)).shape[1] == 2


def test_engines_of_different_sizes_train_in_turn() -> None:
    for error, said, is_divided in run_workers(_train_in_turn, 2):
        assert error <= TOLERANCE
        assert "outside a model's forward" in said and "different parallel.sequence sizes" in said
        assert is_divided
