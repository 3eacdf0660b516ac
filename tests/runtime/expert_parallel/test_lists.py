"""Test that lists of experts train at stage 3 whichever of them each rank uses, without being marked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.model_parallel import BATCH, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers

WIDTH, EXPERTS = 64, 4


class _Mixture(nn.Module):
    """Routes each sample by its first word, and calls the experts that are used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.add_module(name, experts)
        self.name = name

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        found = hidden
        for number, expert in enumerate(self.get_submodule(self.name).children()):
            rows = (first % EXPERTS == number).nonzero().squeeze(-1)
            if len(rows):
                found = found.index_add(0, rows, torch.tanh(expert(hidden[rows])))
        return found


class _Network(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(_Mixture(name) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden, words[:, 0])
        return hidden


def _train(name: str, stage: int) -> dict[str, Tensor]:
    rank, world = join(), torch.distributed.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    engine, *_ = zlaunch.initialize(
        model=_Network(name), config={**settings(stage, 1, world), "parallel": {}}
    )
    for batch in data():
        own = batch[rank * BATCH // world : (rank + 1) * BATCH // world] % 16
        engine.backward(engine(own).square().mean())
        engine.step()
    return {key: value.clone() for key, value in engine.module.state_dict().items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["experts", "local_experts"])
def test_any_routing_trains_as_one_process_does(name: str) -> None:
    wanted = run_workers(_train, 1, name, 0)[0]
    for found in run_workers(_train, 4, name, 3):
        assert distance(found, wanted) < TOLERANCE
