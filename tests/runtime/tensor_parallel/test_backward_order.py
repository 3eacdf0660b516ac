"""Test that the sum of a column layer's input gradient begins before the gradients of weights, and that odd
backward passes get the gradients of plain torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import data, make, settings
from tests.runtime.workers import join, run_workers

WIDTH = 8
PLAN = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
TOLERANCE = 1e-12


class _Mlp(nn.Module):
    """Computes gate and up from one value; ``gate`` serves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        again = self.gate(hidden)
        found: Tensor = self.down(torch.tanh(self.gate(hidden)) * self.up(hidden) + again)
        return hidden + found


def _pair(frozen: str = "", dtype: torch.dtype = torch.float64) -> tuple[_Mlp, Any]:
    """Return a plain model, and an engine of the same one whose ranks share layers."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        model = _Mlp().to(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
        models.append(model)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = settings(0, 2, 1, tensor_parallel={"plan": PLAN}, gradient_clipping=0.0, optimizer=optimizer)
    engine, *_ = zlaunch.initialize(model=models[1], config=config)
    return models[0], engine


def _hidden() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


# -- order


class _Operations(TorchDispatchMode):
    """Keeps the products and collectives that run in it, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.names.append("sum")
        elif name in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.names.append("product")
        return func(*args, **(kwargs or {}))


@contextmanager
def _operations() -> Iterator[list[str]]:
    with _Operations() as mode:
        yield mode.names


def _order() -> list[str]:
    join()
    _, engine = _pair()
    loss = engine(_hidden()).square().sum()
    with _operations() as names:
        engine.backward(loss)
    return names


def test_a_sum_begins_before_the_gradients_of_weights() -> None:
    for names in run_workers(_order, 2):
        # for the inputs of down, of up, and of gate, which is called twice
        before = ["product"] * 4
        # for their weights; the last sum compares the ranks' batches
        assert names == [*before, "sum", *["product"] * 4, "sum"]


def _order_of_llama(section: dict[str, Any]) -> list[str]:
    join()
    model = make("llama", "sdpa", num_hidden_layers=1)
    config = settings(0, 2, 1, tensor_parallel=section, gradient_clipping=0.0)
    engine, *_ = zlaunch.initialize(model=model, config=config)
    batch = data()[0]
    loss = engine(input_ids=batch, labels=batch).loss
    with _operations() as names:
        engine.backward(loss)
    return names


def _products_behind_sums(names: list[str]) -> list[int]:
    """Return how many products follow each collective."""
    counts: list[int] = []
    for name in names:
        if name == "sum":
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return counts


@needs_package("transformers")
@pytest.mark.parametrize(
    ("section", "counts"),
    [
        # behind the sum for the head: its weight, inputs of down, gate and up; for gate and up: their weights
        # and down's, inputs of attention's layers; for these: their weights; for the ranks' batches: nothing
        ({}, [1 + 3, 3 + 4, 4, 0]),
        # the same, with gathers for inputs of down and of the attention's output, and sums for norms
        ({"sequence_parallel": True}, [1, 3, 3, 0, 4, 4, 0, 0, 0]),
    ],
)
def test_layers_of_one_value_share_a_sum(section: dict[str, Any], counts: list[int]) -> None:
    for names in run_workers(_order_of_llama, 2, section):
        assert _products_behind_sums(names) == counts


# -- odd passes


def _step(engine: Any, plain: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Step both, and compare their parameters."""
    engine.step()
    optimizer = torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    found = engine.module.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=tolerance, atol=tolerance)


def _input_alone_then_all() -> None:
    join()
    plain, engine = _pair()
    value = _hidden()
    (wanted,) = torch.autograd.grad(plain(value).square().sum(), value)
    other = _hidden()
    loss = engine(other).square().sum()
    for _ in range(2):  # leaves what the gradients of weights need, which nobody takes
        (found,) = torch.autograd.grad(loss, other, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    for _ in range(2):
        plain(value).square().sum().backward()
        loss.backward()
        _step(engine, plain)
        loss = engine(other).square().sum()


def _weights_alone() -> None:
    """Two times, and before that in a pass that fails when two layers have had their turn."""
    join()
    plain, engine = _pair()
    wanted = torch.autograd.grad(plain(_hidden()).square().sum(), [plain.gate.weight, plain.up.weight])
    outputs: list[Tensor] = []
    engine.module.gate.register_forward_hook(lambda gate, args, output: outputs.append(output))
    parts = [engine.module.gate.weight, engine.module.up.weight]
    loss = engine(_hidden()).square().sum()
    handle = outputs[0].register_hook(_fail)
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(loss, parts, retain_graph=True)
    handle.remove()
    for _ in range(2):
        found = torch.autograd.grad(loss, parts, retain_graph=True)
        for one, full in zip(found, wanted, strict=True):
            expected = full.chunk(2)[torch.distributed.get_rank()]
            torch.testing.assert_close(one, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError


def _gradients_of_gradients() -> None:
    join()
    plain, engine = _pair()
    found = []
    for model, module in ((plain, plain), (engine, engine.module)):
        value = _hidden()
        loss = model(value).square().sum()
        first, of_weight = torch.autograd.grad(loss, [value, module.up.weight], create_graph=True)
        found.append(of_weight)
        (second,) = torch.autograd.grad(first.square().sum(), value, create_graph=True)
        second.square().sum().backward()
    expected = found[0].chunk(2)[torch.distributed.get_rank()]
    torch.testing.assert_close(found[1], expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert found[1].requires_grad
    _step(engine, plain)


def _frozen() -> None:
    join()
    for frozen in ("gate", "up.weight", "down"):
        plain, engine = _pair(frozen=frozen)
        plain(_hidden()).square().sum().backward()
        engine(_hidden()).square().sum().backward()
        _step(engine, plain)
        engine.destroy()


def _autocast() -> None:
    join()
    plain, engine = _pair(dtype=torch.float32)
    for model in (plain, engine):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_hidden().float()).square().mean()
        loss.backward()
    _step(engine, plain, 5e-3)


def _frozen_for_a_call() -> None:
    """In one pass, the first call of gate trains its weight, and the second one does not."""
    join()
    plain, engine = _pair()
    for model, module in ((plain, plain), (engine, engine.module)):
        module.gate.register_forward_hook(_turn)
        loss = model(_hidden()).square().sum()
        module.gate.weight.requires_grad_(True)
        loss.backward()
    _step(engine, plain)


def _turn(gate: Any, args: Any, output: Any) -> None:
    gate.weight.requires_grad_(not gate.weight.requires_grad)


def _kept_bytes() -> None:
    """Gradients of inputs alone leave nothing in the graph."""
    join()
    _, engine = _pair()
    losses = []
    counts = []
    for _ in range(6):
        value = _hidden()
        losses.append(engine(value).square().sum())
        torch.autograd.grad(losses[-1], value)
        gc.collect()
        counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
    # The loss and its input; the layers would leave eight more.
    assert (counts[-1] - counts[0]) / 5 < 5, counts


class _Branches(nn.Module):
    """Computes two row layers from one column layer, and recomputes ``second`` in the backward pass."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.first = nn.Linear(2 * WIDTH, WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def _block(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.up(hidden))
        is_reentrant = self.recompute == "nested"
        again: Tensor = checkpoint(self.second, inner, use_reentrant=is_reentrant)
        return again + self.first(inner) + self.second(inner)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.input(hidden)
        if self.recompute == "nested":
            found: Tensor = checkpoint(self._block, hidden, use_reentrant=True)
            return found
        return self._block(hidden)


def _recomputed() -> None:
    """In a pass inside of the backward pass, and without the column layer."""
    join()
    for recompute in ("nested", "row"):
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            models.append(_Branches(recompute).double())
        plan = {"up": "colwise", "first": "rowwise", "second": "rowwise"}
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        config = settings(0, 2, 1, tensor_parallel={"plan": plan}, gradient_clipping=0.0, optimizer=optimizer)
        engine, *_ = zlaunch.initialize(model=models[1], config=config)
        for _ in range(3):
            for model in (models[0], engine):
                model(_hidden()).square().sum().backward()
            _step(engine, models[0])
        engine.destroy()


PASSES = [
    _recomputed,
    _input_alone_then_all,
    _weights_alone,
    _gradients_of_gradients,
    _frozen,
    _frozen_for_a_call,
    _kept_bytes,
    _autocast,
]


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__[1:])
def test_odd_backward_passes_equal_plain_torch(run: Callable[[], None]) -> None:
    run_workers(run, 2)
