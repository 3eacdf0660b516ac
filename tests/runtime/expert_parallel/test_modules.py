"""Test modules of equal experts, alone and with different ones on different ranks, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.expert_parallel.test_by_hand import EXPERTS, WIDTH, _Network
from tests.runtime.model_parallel import BATCH, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers


class _Expert(nn.Module):
    """Has layers of its own, a weight used twice, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(WIDTH, 6)
        self.inner = nn.Sequential(first, nn.Tanh(), nn.Linear(6, WIDTH, bias=False))
        self.again = nn.Linear(WIDTH, 6)
        self.again.weight = first.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.inner(tokens) + self.again(tokens) @ self.again.weight, None


class _Mixture(nn.Module):
    def __init__(self, routing: str) -> None:
        super().__init__()
        self.routing, self.gate = routing, nn.Linear(WIDTH, EXPERTS)
        self.mixture = zlaunch.Experts([_Expert() for _ in range(EXPERTS)])

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        weights, index = self.gate(hidden).softmax(-1).flatten(0, 1).topk(2)
        if self.routing == "by sample":
            index = (first % EXPERTS).repeat_interleave(hidden.shape[1]).unsqueeze(1).expand_as(index)
        elif self.routing == "dropped":
            index = index.masked_fill(index == 1, -1)
        elif self.routing == "none":
            index = torch.full_like(index, -1)
        mixed = self.mixture(hidden.flatten(0, 1), index, weights)
        return hidden + mixed.view_as(hidden)


def _build(config: dict[str, Any], routing: str, in_init: bool) -> zlaunch.Engine:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    if in_init:
        with zlaunch.zero.Init(config_dict_or_path=config):
            model = _Network(routing, _Mixture)
    else:
        model = _Network(routing, _Mixture)
    engine: zlaunch.Engine = zlaunch.initialize(model=model, config=config)[0]
    return engine


def _run(engine: zlaunch.Engine, batches: list[Tensor]) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    position, ranks = rank * engine.data_parallel_size // world, engine.data_parallel_size
    for batch in batches:
        own = batch[position * BATCH // ranks : (position + 1) * BATCH // ranks] % 16
        engine.backward(engine(own).square().mean())
        engine.step()


def _train(routing: str, expert: int, tensor: int, stage: int, in_init: bool) -> dict[str, Tensor]:
    join()
    world = torch.distributed.get_world_size()
    axes = {"tensor": tensor, "expert": expert}
    extra: dict[str, Any] = {"tensor_parallel": {"plan": {"head": "colwise_gather_output"}}}
    config = settings(stage, tensor, world // tensor, parallel=axes, **(extra if tensor > 1 else {}))
    engine = _build(config, routing, in_init)
    _run(engine, data())
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@cache
def _in_one_process(routing: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = run_workers(_train, 1, routing, 1, 1, 0, False)[0]
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("routing", "expert", "tensor", "stage", "in_init"),
    [
        ("free", 4, 1, 3, False),
        ("free", 2, 1, 2, True),
        ("by sample", 4, 1, 3, True),
        ("by sample", 1, 1, 3, True),
        ("dropped", 2, 2, 3, False),
        ("none", 2, 1, 1, False),
        ("dropped", 1, 1, 0, False),
    ],
    ids=str,
)
def test_any_routing_trains_as_one_process_does(
    routing: str, expert: int, tensor: int, stage: int, in_init: bool
) -> None:
    wanted = _in_one_process(routing)
    for found in run_workers(_train, 4, routing, expert, tensor, stage, in_init):
        assert distance(found, wanted) < TOLERANCE


def _resume(folder: str, expert: int, steps: slice, is_first: bool) -> dict[str, Tensor]:
    join()
    axes = {"expert": expert}
    config = settings(3, 1, torch.distributed.get_world_size(), parallel=axes)
    engine = _build(config, "free", False)
    if not is_first:
        engine.load_checkpoint(folder)
    _run(engine, data()[steps])
    if is_first:
        engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.exhaustive
def test_a_checkpoint_loads_under_another_size(tmp_path: Path) -> None:
    wanted = _in_one_process("free")
    run_workers(_resume, 4, str(tmp_path), 4, slice(0, 3), True)
    for ranks, expert in ((4, 2), (2, 2), (1, 1)):
        found = run_workers(_resume, ranks, str(tmp_path), expert, slice(3, 5), False)[0]
        assert distance(found, wanted) < TOLERANCE


def test_the_experts_are_those_given() -> None:
    torch.manual_seed(1)
    members = [_Expert() for _ in range(EXPERTS)]
    states = [{name: value.clone() for name, value in member.state_dict().items()} for member in members]
    tokens, weights = torch.randn(9, WIDTH, requires_grad=True), torch.rand(9, 2)
    index = torch.stack([torch.arange(9) % 3, torch.arange(9) % 4 - 1], 1)  # 3 of one token, -1 of others
    plain = [member(tokens)[0] for member in members]
    wanted = torch.zeros(9, WIDTH)
    for token, (row, factors) in enumerate(zip(index.tolist(), weights, strict=True)):
        for expert, factor in zip(row, factors, strict=True):
            if expert >= 0:
                wanted[token] += factor * plain[expert][token]
    module = zlaunch.Experts(members)
    torch.testing.assert_close(module(tokens, index, weights), wanted)
    assert len(module) == EXPERTS and module(tokens, index, weights.double()).dtype == torch.float32
    module(tokens, index * 0, weights).sum().backward()
    grad = module.expert.get_parameter("inner.0.weight").grad
    assert grad is not None and grad.shape == (EXPERTS, 6, WIDTH) and grad[0].any() and not grad[1:].any()

    other = zlaunch.Experts([_Expert() for _ in range(EXPERTS)])
    for start in ("", "deepspeed_experts."):
        listed = {
            f"{start}{n}.{name}": value for n, state in enumerate(states) for name, value in state.items()
        }
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        other.load_state_dict(listed)
        torch.testing.assert_close(other(tokens, index, weights), wanted)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.inner"):
        other.load_state_dict({name: value for name, value in listed.items() if ".3." not in name})


def _odd(change: str) -> list[nn.Module]:
    members: list[Any] = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(2)]
    if change == "shape":
        members[1][0] = nn.Linear(4, 5)
    elif change == "class":
        members[1][1] = nn.Tanh()
    elif change == "p":
        members[1][1] = nn.Dropout(0.2)
    elif change == "frozen":
        members[1][0].requires_grad_(False)
    elif change == "shared":
        members[1][0].weight = members[0][0].weight
    elif change == "same":
        members[1] = members[0]
    elif change == "hook":
        members[1].register_forward_hook(print)
    elif change == "buffer":
        members = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    elif change == "empty":
        members = [nn.Tanh(), nn.Tanh()]
    return [] if change == "none" else members


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("shape", "expert 1 differs from expert 0 in 0.out_features: 5 instead of 4"),
        ("class", "in 1: torch.nn.modules.activation.Tanh instead of torch.nn.modules.dropout.Dropout"),
        ("p", "in 1.p: 0.2 instead of 0.1"),
        ("frozen", "in 0.weight"),
        ("shared", "expert 1 shares modules or parameters"),
        ("same", "expert 1 shares modules or parameters"),
        ("hook", "in forward hooks of its class: 1 instead of 0"),
        ("buffer", "BatchNorm1d has running_mean"),
        ("empty", "Tanh has no parameters"),
        ("none", "at least one"),
    ],
)
def test_unequal_experts_are_refused(change: str, said: str) -> None:
    with pytest.raises(zlaunch.ParameterError) as caught:
        zlaunch.Experts(_odd(change))
    assert said in str(caught.value)


def test_wrong_calls_are_refused() -> None:
    module = zlaunch.Experts([nn.Linear(4, 4), nn.Linear(4, 4)])
    tokens, index, weights = torch.ones(3, 4), torch.ones(3, 1, dtype=torch.long), torch.ones(3, 1)
    for wrong in ((tokens.unsqueeze(0), index, weights), (tokens, index[:2], weights[:2])):
        with pytest.raises(zlaunch.ParameterError, match="got shapes"):
            module(*wrong)
    with pytest.raises(zlaunch.ParameterError, match=r"index of int64, got torch\.float32"):
        module(tokens, index.float(), weights)
    with pytest.raises(zlaunch.ParameterError, match="a list of at least one module"):
        zlaunch.Experts(nn.Linear(4, 4))  # type: ignore[arg-type]  # what a script may do
    for wrong_index, number in ((index + 1, 2), (index + 10**12, 10**12 + 1), (index - 6, -5)):
        with pytest.raises(zlaunch.ParameterError, match=f"routed to expert {number}: expected 0 to 1"):
            module(tokens, wrong_index, weights)
    wider = zlaunch.Experts([nn.Linear(4, 5), nn.Linear(4, 5)])
    with pytest.raises(zlaunch.ParameterError, match=r"Linear returns \[3, 5\] for tokens \[3, 4\]"):
        wider(tokens, index, weights)


class _Named(nn.Module):
    """Calls its experts by the names of their arguments."""

    def __init__(self, moved: int) -> None:
        super().__init__()
        self.gate, self.moved = nn.Linear(4, 4), moved
        self.experts = zlaunch.Experts([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        found: Tensor = self.experts(tokens=tokens, weights=weights, index=index + self.moved)
        return found


def _called_by_name(moved: int, expert: int) -> Tensor | str:
    join()
    torch.manual_seed(4)
    model = _Named(moved)
    settled = settings(1, 1, expert, parallel={"expert": expert})
    engine, *_ = zlaunch.initialize(model=model, config=settled)
    try:
        found: Tensor = engine(torch.arange(8.0).view(2, 4)).detach()
        return found
    except zlaunch.ParameterError as error:
        return str(error)


def test_names_of_arguments_and_numbers_of_no_expert_are_those_of_one_process() -> None:
    wanted = run_workers(_called_by_name, 1, 0, 1)[0]
    for found in run_workers(_called_by_name, 2, 0, 2):
        torch.testing.assert_close(found, wanted)
    for said in run_workers(_called_by_name, 2, 4, 2):
        assert "experts: a token is routed to expert 7: expected 0 to 3" in said


def _called_wrongly(shift: int) -> str:
    join()
    config = settings(1, 1, 2, parallel={"expert": 2})
    model = nn.Sequential(zlaunch.Experts([nn.Linear(4, 4) for _ in range(EXPERTS)]))
    zlaunch.initialize(model=model, config=config)
    index = torch.arange(EXPERTS).unsqueeze(1) + shift
    with pytest.raises(zlaunch.ParameterError) as caught:
        model[0](torch.ones(EXPERTS, 4), index, torch.ones(EXPERTS, 1))
    return str(caught.value)


@pytest.mark.parametrize(("shift", "number"), [(3, 6), (-2, -2)])
def test_an_index_of_no_expert_is_refused_on_several_ranks(shift: int, number: int) -> None:
    for said in run_workers(_called_wrongly, 2, shift):
        assert f"0: a token is routed to expert {number}: expected 0 to 3, or -1 for none" in said


def _load_listed(stage: int) -> dict[str, tuple[Tensor, Tensor]]:
    join()
    engine = _build(settings(stage, 1, 2, parallel={"expert": 2}), "free", False)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    listed: dict[str, Tensor] = {}
    for name, value in before.items():
        start, at, rest = name.partition(".expert.")
        listed |= {f"{start}.{n}.{rest}": value[n] + n for n in range(EXPERTS)} if at else {name: value}
    engine.module.load_state_dict(listed)
    return {name: (before[name], value.clone()) for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_list_of_all_experts_loads_where_ranks_have_some(stage: int) -> None:
    for states in run_workers(_load_listed, 2, stage):
        for name, (before, after) in states.items():
            added = torch.arange(EXPERTS).view(-1, *[1] * (before.dim() - 1)) if ".expert." in name else 0
            assert torch.equal(after, before + added), name


def _refused() -> list[str]:
    join()
    model = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), nn.Linear(2, 2))
    experts = {"experts": ["0"]}
    named = nn.Sequential()
    named.add_module("experts", nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
    given: list[tuple[nn.Module, dict[str, Any]]] = [
        (model, {"parallel": {"expert": 2}, "expert_parallel": experts}),
        (
            nn.Sequential(zlaunch.Experts([nn.Linear(2, 2), nn.Linear(2, 2)])),
            {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": {"0.expert": "colwise"}}},
        ),
        (named, {"parallel": {"expert": 2}}),
    ]
    said = []
    for each, more in given:
        with pytest.raises(zlaunch.ParameterError) as caught:
            zlaunch.initialize(model=each, config=settings(1, 1, 1, **more) | {"train_batch_size": 16})
        said.append(str(caught.value))
    return said


def test_lists_and_cut_experts_are_refused() -> None:
    for listed, cut, unnamed in run_workers(_refused, 2):
        assert "0 is a ModuleList of separate modules" in listed and "zlaunch.Experts" in listed
        assert "wrap the modules of experts in zlaunch.Experts([...])" in unnamed
        assert "0.expert holds several experts ([2, 2, 2])" in cut
