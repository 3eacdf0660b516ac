"""Test that destroyed engines give back what they held, on each axis."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import net
from tests.runtime.workers import join, run_workers
from zlaunch.sequence import attention, split

AXES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"plan": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}},
    "expert": {},
    "sequence": {},
    "pipeline": {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2},
}


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = zlaunch.Experts([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        index = (torch.arange(len(x)) % 2).unsqueeze(1)
        found: Tensor = self.experts(x, index, torch.ones(len(x), 1))
        return found


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return attention(heads, heads, heads).transpose(1, 2).flatten(2)


def _train(axis: str, rank: int) -> nn.Module:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "parallel": {axis: 2}, **AXES[axis]}
    if axis == "pipeline":
        model: nn.Module = net(depth=2)
        engine, *_ = zlaunch.initialize(model=model, config=config)
        batch = torch.ones(2, 4, dtype=torch.int64)
        engine.train_batch(iter([(batch, batch)] * 2), lambda logits, _: logits.square().mean())
    else:
        model = {"tensor": lambda: net(depth=1), "expert": _Mixture, "sequence": _Attention}[axis]()
        engine, *_ = zlaunch.initialize(model=model, config=config)
        inputs = {
            "tensor": lambda: torch.ones(2, 4, dtype=torch.int64),
            "expert": lambda: torch.ones(4, 8) * rank,
            "sequence": lambda: split(torch.ones(2, 4, 8)),
        }[axis]()
        engine.backward(engine(inputs).square().mean())
        engine.step()
    engine.destroy()
    return model


def _held(axis: str) -> list[tuple[int, int]]:
    rank = join()
    found, models = [], []
    for _ in range(3):
        models.append(_train(axis, rank))  # a script may keep the model: it holds nothing of the engine's
        gc.collect()
        torch.distributed.barrier()
        process = psutil.Process()
        found.append((process.num_fds(), process.num_threads()))
    return found


@pytest.mark.parametrize("axis", AXES)
def test_destroyed_engines_keep_no_descriptors_and_threads(axis: str) -> None:
    # without shared memory, where the weights of a model that is kept have descriptors
    for (descriptors, threads), *later in run_workers(_held, 2, axis, env={"ZLAUNCH_SHARED_MEMORY": "0"}):
        # gloo closes some a moment after the group is gone, so a later engine may have fewer
        assert all(held[0] <= descriptors and held[1] <= threads for held in later), later
