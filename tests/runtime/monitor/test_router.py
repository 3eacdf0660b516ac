"""Test the statistics of routers: how evenly the tokens of a step go to the experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zlaunch
from tests.needs import needs_package
from tests.runtime.models import config
from tests.runtime.workers import run_workers

WIDTH = 8
EXPERTS = 4


class Block(nn.Module):
    """Sends tokens to the experts that the input names."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = zlaunch.Experts([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def forward(self, tokens: Tensor, index: Tensor) -> Tensor:
        found: Tensor = self.mixture(tokens, index, torch.ones_like(index, dtype=tokens.dtype))
        return tokens + found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor, *routes: Tensor) -> Tensor:
        for layer, index in zip(self.layers, routes, strict=True):
            tokens = layer(tokens, index)
        return tokens


EVEN = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]])
"""Gives each expert three tokens."""
UNEVEN = torch.tensor([[0, 1], [0, 1], [0, -1], [0, 1], [0, -1], [0, 1]])
"""Gives 6, 4, 0 and 0, and drops two pairs."""
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 3)},
    "checkpointed": {"stage": 3, "activation_checkpointing": {"enabled": True}},
    "expert parallel": {"stage": 1, "parallel": {"expert": 2}},
    "two passes": {"stage": 2, "accumulation": 2},
}


def _train(case: str) -> list[dict[str, float]]:
    """Return the statistics of two steps of a rank. An evaluation and a copy's pass before do not count."""
    zlaunch.init_distributed()
    torch.manual_seed(0)
    given = {"accumulation": 1, **CASES[case]}
    engine, *_ = zlaunch.initialize(model=Model(), config=config(micro=1, **given))
    found = []
    for routes in ((EVEN, UNEVEN), (EVEN, EVEN)):
        engine.eval()
        with torch.no_grad():
            engine(torch.randn(len(EVEN), WIDTH), UNEVEN, UNEVEN)
        engine.train()
        if given["stage"] == 0:
            copy.deepcopy(engine.module)(torch.randn(len(EVEN), WIDTH), UNEVEN, UNEVEN)
        for _ in range(given["accumulation"]):
            engine.backward(engine(torch.randn(len(EVEN), WIDTH, requires_grad=True), *routes).sum())
            engine.step()
        found.append({name: float(value) for name, value in engine.step_metrics().items()})
    model = engine.module
    engine.destroy()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_load_of_experts_is_that_of_the_first_rank(case: str) -> None:
    first, other = run_workers(_train, 2, case)
    uneven = first[0]
    even = first[1]
    assert uneven["expert_max_load"] == pytest.approx(6 / (10 / 4))
    assert uneven["unused_experts"] == 2
    assert uneven["dropped_tokens"] == pytest.approx(2 / 24)
    assert even["expert_max_load"] == pytest.approx(1)
    assert even["unused_experts"] == even["dropped_tokens"] == 0
    assert not [name for name in other[0] if "expert" in name]


def _mixtral() -> tuple[dict[str, float], float, float]:
    """Return the statistics of a step, and what the output's router logits say."""
    from transformers import MixtralConfig, MixtralForCausalLM

    zlaunch.init_distributed()
    torch.manual_seed(0)
    sizes = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        output_router_logits=True,
    )
    engine, *_ = zlaunch.initialize(model=MixtralForCausalLM(sizes), config=config(3, micro=1))
    tokens = torch.randint(0, 64, (1, 40))
    output = engine(input_ids=tokens, labels=tokens)
    engine.backward(output.loss)
    engine.step()
    chosen = [logits.topk(2).indices.flatten() for logits in output.router_logits]
    loads = [torch.bincount(each, minlength=EXPERTS) for each in chosen]
    found = {name: float(value) for name, value in engine.step_metrics().items()}
    return found, max(float(load.max() / load.float().mean()) for load in loads), float(output.aux_loss)


@needs_package("transformers")
def test_a_hugging_face_model() -> None:
    for rank, (found, load, loss) in enumerate(run_workers(_mixtral, 2)):
        if rank == 0:
            assert found["expert_max_load"] == pytest.approx(load)
            assert found["balance_loss"] == pytest.approx(loss)


def test_a_compiled_block_stays_one_graph_and_is_not_counted() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = Stacked()
    engine, *_ = zlaunch.initialize(model=model, config=config(0, 1, expert_parallel={"experts": ["inner"]}))
    whole: Any = torch.compile(engine.module.forward, backend="eager", fullgraph=True)
    index = torch.zeros(4, 1, dtype=torch.int64)
    weights = torch.ones(4, 1)
    compiled = whole(torch.ones(4, WIDTH), index, weights)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    engine.backward(compiled.sum())
    engine.step()
    assert "expert_max_load" not in engine.step_metrics()
    engine.backward(engine(torch.ones(4, WIDTH), index=index, weights=weights).sum())
    engine.step()
    assert float(engine.step_metrics()["expert_max_load"]) == EXPERTS
    engine.destroy()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.ones(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return tokens * self.stack[index[:, 0]] * weights


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = self.inner(tokens, index=index, weights=weights)
        return found
