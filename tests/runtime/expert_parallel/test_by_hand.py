"""Test mixtures of a script's own whose experts are on different ranks, with any routing, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.model_parallel import BATCH, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers

WIDTH, EXPERTS = 8, 4


class _Experts(nn.Module):
    """Computes a weighted sum of experts of one matrix for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert in range(len(self.weight)):
            row, slot = (index == expert).nonzero(as_tuple=True)
            own = torch.tanh(tokens[row] @ self.weight[expert] + self.bias[expert])
            found = found.index_add(0, row, own * weights[row, slot].unsqueeze(-1))
        return found


class _Mixture(nn.Module):
    """Routes by a matrix, or every token of a sample as its first word says."""

    def __init__(self, routing: str) -> None:
        super().__init__()
        self.routing = routing
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = _Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)
        if self.routing == "one":
            scores = scores * nn.functional.one_hot(torch.zeros_like(first), EXPERTS).unsqueeze(1)
        elif self.routing == "by sample":
            scores = scores * nn.functional.one_hot(first % EXPERTS, EXPERTS).unsqueeze(1)
        elif self.routing == "pairs":
            scores = scores * (torch.arange(EXPERTS) // 2 == (first % 2).view(-1, 1)).unsqueeze(1)
        weights, index = scores.flatten(0, 1).topk(2 if self.routing in ("free", "pairs") else 1)
        mixed = self.experts(hidden.flatten(0, 1), index, weights)
        return hidden + mixed.view_as(hidden) + torch.tanh(self.shared(hidden))


class _Network(nn.Module):
    def __init__(self, routing: str, kind: Callable[[str], nn.Module] = _Mixture) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(kind(routing) for _ in range(3))
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden, words[:, 0])
        found: Tensor = self.head(hidden)
        return found


def _train(routing: str, expert: int, stage: int, in_init: bool, odd: bool) -> dict[str, Tensor]:
    join()
    world = torch.distributed.get_world_size()
    rest = {"parallel": {"expert": expert}, "expert_parallel": {"experts": ["layers.*.experts"]}}
    config = settings(stage, 1, world, **(rest if expert > 1 else {"parallel": {}}))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    if in_init:
        with zlaunch.zero.Init(config_dict_or_path=config):
            model = _Network(routing)
    else:
        model = _Network(routing)
    engine, *_ = zlaunch.initialize(model=model, config=config)
    rank = torch.distributed.get_rank()
    for batch in data():
        if world == 1 and odd:
            losses = [engine(part).square().mean() for part in _odd_parts(batch % 16, 4)]
            engine.backward(torch.stack(losses).mean())
        elif odd:
            engine.backward(engine(_odd_parts(batch % 16, world)[rank]).square().mean())
        else:
            own = batch[rank * BATCH // world : (rank + 1) * BATCH // world] % 16
            engine.backward(engine(own).square().mean())
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def _odd_parts(batch: Tensor, count: int) -> list[Tensor]:
    """Cut a batch so that ranks have sequences of different lengths."""
    return [part[:, : 3 + 2 * index] for index, part in enumerate(batch.chunk(count))]


@cache
def _in_one_process(routing: str, odd: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run_workers(_train, 1, routing, 1, 0, False, odd)[0]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("routing", "expert", "stage", "in_init", "odd"),
    [
        ("free", 4, 3, False, False),
        ("free", 2, 2, True, False),
        ("one", 4, 3, False, False),
        ("by sample", 2, 1, False, False),
        ("pairs", 2, 3, True, True),
        ("by sample", 4, 0, False, True),
    ],
    ids=str,
)
def test_any_routing_trains_as_one_process_does(
    routing: str, expert: int, stage: int, in_init: bool, odd: bool
) -> None:
    wanted = _in_one_process(routing, odd)
    for found in run_workers(_train, 4, routing, expert, stage, in_init, odd):
        assert distance(found, wanted) < TOLERANCE


def _moved() -> tuple[int, int]:
    join()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    section = {"experts": ["layers.*.experts"]}
    config = settings(3, 1, 2, parallel={"expert": 2}, expert_parallel=section)
    engine, *_ = zlaunch.initialize(model=_Network("by sample"), config=config)
    rank, comm = torch.distributed.get_rank(), engine.comm
    batch = (data()[0] % 16)[rank * BATCH // 2 : (rank + 1) * BATCH // 2]
    words: list[Any] = [None, None]
    torch.distributed.all_gather_object(words, batch[:, 0])
    length, layers, k, ranks = batch.shape[1], 3, 1, 2
    sent = len(batch) * length  # each token to one rank
    came = sum(int((first % EXPERTS // 2 == rank).sum()) for first in words) * length
    forward = sent * (WIDTH + 2 * k) + came * WIDTH + ranks
    backward = came * (WIDTH + k) + sent * WIDTH
    before = comm.moved["expert"]
    engine.backward(engine(batch).square().mean())
    return comm.moved["expert"] - before, layers * (forward + backward)


def test_what_the_axis_moves_is_the_formula() -> None:
    for moved, wanted in run_workers(_moved, 2):
        assert moved == wanted


def _wrong_call() -> str:
    join()

    class Flat(_Network):
        def forward(self, words: Tensor) -> Tensor:
            found: Tensor = self.get_submodule("layers.0.experts")(self.words(words), words, words)
            return found

    section = {"experts": ["layers.*.experts"]}
    config = settings(1, 1, 2, parallel={"expert": 2}, expert_parallel=section)
    engine, *_ = zlaunch.initialize(model=Flat("free"), config=config)
    try:
        engine(torch.ones(2, 3, dtype=torch.long))
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


def test_other_calls_are_refused() -> None:
    for said in run_workers(_wrong_call, 2):
        assert "weights (n, k), got shapes [2, 3, 8], [2, 3], [2, 3]" in said
