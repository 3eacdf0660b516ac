"""Test DeepSpeed's layer of experts: what its gates choose, and ranks that have different experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.model_parallel import BATCH, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed import engine as alias
from zlaunch.compat.deepspeed import moe
from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.compat.deepspeed.moe import MoE
from zlaunch.compat.deepspeed.parallel import take_over_sizes

WIDTH = 8


def _by_hand(layer: MoE, tokens: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor, list[int]]:
    """Return what a layer without random numbers computes, token by token."""
    gate, count = layer.deepspeed_moe.gate, layer.num_experts
    gates = (tokens.float() @ gate.wg.weight.float().t()).softmax(1)
    order = gates.argsort(1, descending=True)[:, : gate.k].tolist()
    factor = (gate.capacity_factor if layer.training else gate.eval_capacity_factor) * gate.k
    capacity = max(math.ceil(len(tokens) / count * factor), gate.min_capacity)
    if not gate.drop_tokens:
        capacity = len(tokens)
    kept: set[tuple[int, int]] = set()
    chosen = [0] * count
    for expert in range(count):
        wanted = [
            token
            for place in range(gate.k)
            for token in range(len(tokens))
            if order[token][place] == expert and (used is None or used[token])
        ]
        chosen[expert] = len(wanted)
        if gate.k > 2:
            wanted.sort(key=lambda token: -gates[token, expert].item())
        kept |= {(token, expert) for token in wanted[:capacity]}
    share = torch.tensor([sum(row.count(e) for row in order) for e in range(count)]) / len(tokens)
    if gate.k == 2:
        share = torch.tensor([sum(row[0] == e for row in order) for e in range(count)]) / len(tokens)
    if used is not None:
        share = torch.tensor(chosen) / len(tokens)
    l_aux = (gates.mean(0) * share).sum() * count / (gate.k if gate.k > 2 else 1)
    output = torch.zeros_like(tokens)
    matrix, bias = layer.deepspeed_moe.experts.expert.parameters()
    for token in range(len(tokens)):
        mine = [expert for expert in order[token] if (token, expert) in kept]
        total = sum((gates[token, expert] for expert in mine), torch.zeros(()))
        for expert in mine:
            weight = gates[token, expert] / (1 if gate.k == 1 else total)
            output[token] += weight * torch.tanh(matrix[expert] @ tokens[token] + bias[expert])
    return output, l_aux, chosen


def _layer(**options: Any) -> MoE:
    torch.manual_seed(3)
    layer = MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), num_experts=4, **options)
    for parameter in layer.deepspeed_moe.experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("drop_tokens", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_is_its_formula(k: int, drop_tokens: bool, is_training: bool) -> None:
    layer = _layer(
        k=k,
        capacity_factor=0.75,
        eval_capacity_factor=1.5,
        min_capacity=1,
        drop_tokens=drop_tokens,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    ).train(is_training)
    hidden = torch.randn(3, 7, WIDTH)
    output, l_aux, counts = layer(hidden)
    wanted, wanted_aux, wanted_counts = _by_hand(layer, hidden.flatten(0, 1))
    torch.testing.assert_close(output, wanted.view_as(hidden))
    torch.testing.assert_close(l_aux, wanted_aux)
    assert counts.tolist() == wanted_counts


def test_unused_tokens_and_the_residual() -> None:
    layer = _layer(use_rts=False, min_capacity=2, use_residual=True)
    hidden, used = torch.randn(12, WIDTH), torch.arange(12) % 3 > 0
    mixed, l_aux, counts = _by_hand(layer, hidden, used)
    share = layer.coefficient(hidden).softmax(-1)
    output, found_aux, found_counts = layer(hidden, used)
    torch.testing.assert_close(output, mixed * share[:, :1] + layer.mlp(hidden) * share[:, 1:])
    torch.testing.assert_close(found_aux, l_aux)
    assert found_counts.tolist() == counts and sum(counts) == 8
    l_aux_grad = torch.autograd.grad(found_aux, layer.deepspeed_moe.gate.wg.weight)[0]
    assert l_aux_grad.any()


def test_chance_chooses_who_has_room() -> None:
    layer = _layer(min_capacity=1, capacity_factor=0.5)
    hidden = torch.randn(64, WIDTH)
    went = [layer(hidden)[0].any(1) for _ in range(20)]
    counts = layer(hidden)[2]
    room = int(counts.clamp_max(8).sum())
    assert {int(each.sum()) for each in went} == {room} and len({tuple(each.tolist()) for each in went}) > 10
    noisy = _layer(noisy_gate_policy="RSample", drop_tokens=False)
    assert not torch.equal(noisy(hidden)[2], noisy(hidden)[2])
    noisy.eval()
    assert torch.equal(noisy(hidden)[2], noisy(hidden)[2])
    jittered = _layer(noisy_gate_policy="Jitter", drop_tokens=False)
    assert not torch.equal(jittered(hidden)[1], jittered(hidden)[1])
    second = _layer(k=2, drop_tokens=False).eval()
    assert not torch.equal(second(hidden)[2], second(hidden)[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ep_size": 3}, "4 experts cannot be divided by ep_size = 3"),
        ({"k": 5}, "k is 5, expected 1 to 4"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy is 'Loud'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(zlaunch.ParameterError, match=said):
        _layer(**options)
    with pytest.raises(NotInZlaunch, match="enable_expert_tensor_parallelism"):
        _layer(enable_expert_tensor_parallelism=True)


class _Network(nn.Module):
    def __init__(self, ep_size: int, sizes: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        options: dict[str, Any] = {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.words = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, size or ep_size, **options) for size in sizes
        )

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden, total = self.words(words), torch.zeros(())
        for layer in self.layers:
            mixed, l_aux, _ = layer(hidden)
            hidden, total = hidden + mixed, total + l_aux
        return hidden, total


def _train(ep_size: int, stage: int, in_groups: bool) -> dict[str, Tensor]:
    join()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    model = _Network(ep_size)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter)
    groups: Any = None
    if in_groups:
        groups = moe.configure_moe_param_groups(list(model.parameters()))
        assert [moe.is_moe_param_group(group) for group in groups] == [False, True]
    config = settings(stage, 1, world) | {"parallel": {}}
    engine, *_ = alias.initialize(model=model, model_parameters=groups, config=config)
    for batch in data():
        parts = batch.chunk(4)
        own = parts[rank * 4 // world : (rank + 1) * 4 // world]
        losses = []
        for part in own:
            hidden, l_aux = engine(part)
            losses.append(hidden.square().mean() + 0.01 * l_aux)
        engine.backward(torch.stack(losses).mean())
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ep_size", "stage", "in_groups"), [(4, 3, False), (2, 2, True), (1, 3, True)])
def test_ranks_with_different_experts(ep_size: int, stage: int, in_groups: bool) -> None:
    assert BATCH % 4 == 0
    wanted = run_workers(_train, 1, 1, 0, False)[0]
    for found in run_workers(_train, 4, ep_size, stage, in_groups):
        assert distance(found, wanted) < TOLERANCE


def test_sizes_that_differ_are_refused() -> None:
    given = settings(1, 1, 1) | {"parallel": {}}
    assert take_over_sizes(_Network(1), given) is given
    taken = take_over_sizes(_Network(4), given)
    assert (
        taken["parallel"] == {"expert": 4} and taken.items() >= (given | {"parallel": {"expert": 4}}).items()
    )
    with pytest.raises(zlaunch.ConfigError, match=r"layers\.1 \(ep_size=2\) contradicts layers\.0"):
        take_over_sizes(_Network(1, (4, 2)), given)
    with pytest.raises(zlaunch.ConfigError, match=r"layers\.0 \(ep_size=4\) contradicts parallel\.expert"):
        take_over_sizes(_Network(4), given | {"parallel": {"expert": 2}})


def test_groups_of_parameters() -> None:
    model = _Network(2)
    assert moe.has_moe_layers(model) == (True, 4)
    given = {"params": list(model.parameters()), "lr": 0.5, "name": "all"}
    rest, *own = moe.split_params_into_different_moe_groups_for_optimizer(given, 4 * WIDTH * WIDTH)
    assert [group["name"] for group in own] == ["ep_size_2"] * len(own) and own[0]["lr"] == 0.5
    parts = [[parameter.numel() for parameter in group["params"]] for group in own]
    assert parts == [[256], [32], [256], [32]] and all(group["moe"] for group in own)
    assert not any(moe.is_moe_param(parameter) for parameter in rest["params"])
    shared, routed = moe.split_params_into_shared_and_expert_params(model.parameters())
    assert len(shared) == 3 and len(routed) == 4
