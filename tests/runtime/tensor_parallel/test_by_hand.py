"""Test that models which ranks share by a plan of the config train as one process does, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import zlaunch
from tests.runtime.model_parallel import BATCH, TOLERANCE, data, distance, settings
from tests.runtime.workers import join, run_workers


class _Network(nn.Module):
    """Has layers of two linear maps, with biases and a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8, padding_idx=3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.words(words)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            hidden = hidden + layer["down"](torch.tanh(layer["up"](hidden)))
        found: torch.Tensor = self.head(hidden)
        return found


PLANS = [
    {"words": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"},
    {
        "words": "embedding_colwise",
        "layers.*.up": "colwise_gather_output",
        "layers.*.down": "rowwise_split_input",
        "head": "colwise_gather_output",
    },
]


def _train_own(plan: dict[str, str] | None, in_init: bool, noted: bool = False) -> dict[str, torch.Tensor]:
    join()
    world = torch.distributed.get_world_size()
    tensor = 2 if plan else 1
    config = settings(3, tensor, world // tensor, tensor_parallel={"plan": None if noted else plan})
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    if in_init:
        with zlaunch.zero.Init(config_dict_or_path=config):
            model = _Network()
    else:
        model = _Network()
    if noted:
        zlaunch.tensor_parallel(model.words, {"": "embedding_rowwise"})
        for layer in model.layers:
            zlaunch.tensor_parallel(layer, {"up": "colwise", "down": "rowwise"})
    engine, *_ = zlaunch.initialize(model=model, config=config)
    position, size = torch.distributed.get_rank() // tensor, world // tensor
    for batch in data():
        own = batch[position * BATCH // size : (position + 1) * BATCH // size] % 16
        engine.backward(engine(own).square().mean())
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_init", [False, True], ids=["plain", "zero.Init"])
def test_plans_by_hand(in_init: bool) -> None:
    wanted = run_workers(_train_own, 1, None, in_init)[0]
    for plan in PLANS:
        for found in run_workers(_train_own, 4, plan, in_init):
            assert distance(found, wanted) < TOLERANCE


def test_plans_that_modules_are_given() -> None:
    wanted = run_workers(_train_own, 1, None, False)[0]
    for found in run_workers(_train_own, 4, PLANS[0], False, True):
        assert distance(found, wanted) < TOLERANCE


def test_a_plan_for_something_else_is_refused() -> None:
    with pytest.raises(zlaunch.ParameterError, match="tensor_parallel: no module or parameter matches layer"):
        zlaunch.tensor_parallel(_Network(), {"layer.*.up": "colwise"})
    with pytest.raises(zlaunch.ParameterError, match="up: the style 'columns' is not supported"):
        zlaunch.tensor_parallel(_Network(), {"layers.*.up": "columns"})


def _words_of_no_row() -> list[str]:
    join()
    engine, *_ = zlaunch.initialize(
        model=_Network(), config=settings(1, 2, 1, tensor_parallel={"plan": PLANS[0]})
    )
    said = []
    for word in (16, -1):
        try:
            engine(torch.tensor([[0, word]]))
        except IndexError as error:
            said.append(str(error))
    return said


def test_a_word_of_no_row_is_an_error_as_in_one_process() -> None:
    for said in run_workers(_words_of_no_row, 2):
        assert len(said) == 2 and all("out of range" in each for each in said)


class _Twice(_Network):
    """Has a module of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.head


class _Normed(_Network):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict) and isinstance(layer["down"], nn.Linear)
            weight_norm(layer["down"])


class _Replaced(_Network):
    def __init__(self) -> None:
        super().__init__()
        head = self.head
        head.forward = lambda input: 2 * nn.functional.linear(input, head.weight, head.bias)  # type: ignore[method-assign]


def _wrong(kind: type[_Network], plan: dict[str, str]) -> str:
    join()
    try:
        engine, *_ = zlaunch.initialize(
            model=kind(), config=settings(1, 2, 1, tensor_parallel={"plan": plan})
        )
        engine(data()[0] % 16)
    except zlaunch.ZlaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        (_Network, {"layers.*.up.weight": "colwise", "layers.*.down.weight": "rowwise"},
         "layers.0.up.weight belongs to a Linear: set the style on the module, layers.0.up"),
        (_Network, {"layers.*.down": "rowwise"}, "layers.0.down gets 12 inputs on each rank"),
        (_Twice, {"again.weight": "colwise"}, "again is another name of the same module"),
        (_Normed, PLANS[0], "layers.0.down.weight is computed from other parameters"),
        (_Replaced, PLANS[1], "head.forward was replaced"),
    ],
    ids=["parameters", "whole inputs", "second name", "computed", "replaced"],
)  # fmt: skip
def test_plans_that_would_compute_something_else_are_refused(
    kind: type[_Network], plan: dict[str, str], said: str
) -> None:
    for found in run_workers(_wrong, 2, kind, plan):
        assert said in found and found


def _used_again() -> list[str]:
    join()
    config = settings(1, 2, 1, tensor_parallel={"plan": PLANS[0]})
    engine, *_ = zlaunch.initialize(model=_Network(), config=config)
    copied = copy.deepcopy(engine.module)
    engine.destroy()
    said = []
    for model in (engine.module, copied):
        for other in (config, settings(1, 1, 2)):
            try:
                zlaunch.initialize(model=model, config=other)
            except zlaunch.ZlaunchError as error:
                said.append(str(error))
    return said


def test_a_model_that_is_cut_already_is_refused() -> None:
    for said in run_workers(_used_again, 2):
        assert len(said) == 4 and all("from an earlier engine" in each for each in said)


class _Mixture(nn.Module):
    """Has experts whose weights are called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), _Experts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        found: torch.Tensor = self.experts(tokens, weights=weights, index=index)
        return tokens + found


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 8)), nn.Parameter(torch.randn(4, 8, 12))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(torch.einsum("nw,nkfw->nkf", tokens, self.up[index]))
        return torch.einsum("nkf,nkwf,nk->nw", inner, self.down[index], weights)


def _train_experts(tensor: int) -> dict[str, torch.Tensor]:
    join()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(4)
    plan = {"experts": "moe_tp_experts", "experts.up": "colwise", "experts.down": "rowwise"}
    section = {"tensor_parallel": {"plan": plan}} if tensor > 1 else {}
    engine, *_ = zlaunch.initialize(model=_Mixture(), config=settings(1, tensor, 1, **section))
    for batch in data():
        engine.backward(engine(batch[:, :8] / 32.0).square().mean())
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def test_experts_that_are_called_by_name_train_as_in_one_process() -> None:
    wanted = run_workers(_train_experts, 1, 1)[0]
    for found in run_workers(_train_experts, 2, 2):
        assert distance(found, wanted) < TOLERANCE
