"""Test a script's own autograd.Function that takes a sharded parameter from its context (stage 3)."""

from __future__ import annotations

import os
import types
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Layer, config, relative_error
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed.parameters import ZeroParamStatus, use_deepspeeds_placeholders
from zlaunch.runtime.zero.placeholder import UnitState
from zlaunch.runtime.zero.unit import owner_of

WIDTH, VOCABULARY = 32, 160
TOLERANCE = 1e-9
saved: list[Tensor] = []
"""Collects the weights that backward passes find in their context."""
left: list[UnitState] = []
"""Collects what the units of these are when GatheredParameters has been left."""


def _if_sharded(*parameters: Any) -> Any:
    """Gather those parameters that are not here, as TRL's ``maybe_gather_lm_head_ctx`` does."""
    if not hasattr(parameters[0], "ds_id"):  # a plain model
        return nullcontext()
    absent = [p for p in parameters if p.ds_status != ZeroParamStatus.AVAILABLE]
    return zlaunch.zero.GatheredParameters(absent)


def _always(*parameters: Any) -> Any:
    return zlaunch.zero.GatheredParameters(parameters)


class Head(torch.autograd.Function):
    """Multiplies by a weight that it saves, and gathers in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gather: Any) -> Tensor:
        ctx.gather = gather
        ctx.save_for_backward(x, weight, bias, weight.detach())
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, detached = ctx.saved_tensors
        assert weight is not detached and not detached.requires_grad
        saved.append(weight)
        with ctx.gather(weight, bias):
            grad_x, grad_weight = grad @ weight, x.t() @ grad
        unit = owner_of(weight)
        if unit is not None:
            left.append(unit.state)
        # the weight's gradient is not laid out like the weight: torch asks for the weight's shape to copy it
        return grad_x, grad_weight.t(), grad.sum(0), None


class Net(nn.Module):
    def __init__(self, gather: Any, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width).double() for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY).double()
        self.gather = gather
        self.plain_linear = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        with self.gather(self.head.weight, self.head.bias):
            if self.plain_linear:
                # torch saves the weight itself, and no view that would keep its memory
                return (x[:, None] * self.head.weight).sum(-1) + self.head.bias
            y: Tensor = Head.apply(x, self.head.weight, self.head.bias, self.gather)
        return y


def _loss(model: Any, x: Tensor, penalty: bool) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    loss = y.square().mean()
    if penalty:
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        loss = loss + grad.square().mean()
    return loss


def _train(gather: Any, *, penalty: bool = False, width: int = WIDTH, linear: bool = False) -> float:
    torch.manual_seed(1)
    plain, model = Net(_if_sharded, width), Net(gather, width)
    plain.load_state_dict(model.state_dict())
    model.plain_linear = linear
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    engine, *_ = zlaunch.initialize(model=model, config=config(3, 2))
    for step in range(2):
        x = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        _loss(plain, x, penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(_loss(engine, x.chunk(2)[engine.global_rank], penalty))
        if not linear:
            assert saved.pop() is model.head.weight
            assert {*left} == {UnitState.UNSHARDED}  # the gradients of their parameters are due
            left.clear()
        engine.step()
    state, wanted = model.state_dict(), plain.state_dict()
    error = max(relative_error(state[name], wanted[name]) for name in wanted)
    engine.destroy()
    return error


def _functions() -> dict[str, float]:
    join()
    found = {}
    for placeholders in ("nan", "empty"):
        if placeholders == "empty":
            use_deepspeeds_placeholders()
        for hooks in ("1", "0"):
            os.environ["ZLAUNCH_SAVED_TENSOR_HOOKS"] = hooks
            found[f"{placeholders}, hooks {hooks}"] = _train(_always)
        found[f"{placeholders}, linear without hooks"] = _train(_always, linear=True)
        found[f"{placeholders}, one unit"] = _train(_always, width=WIDTH // 4)
        os.environ["ZLAUNCH_SAVED_TENSOR_HOOKS"] = "1"
        found[f"{placeholders}, twice"] = _train(_always, penalty=True)
    found["ds_status"] = _train(_if_sharded)
    return found


@pytest.mark.rotated
def test_a_function_gathers_the_parameter_that_it_has_saved() -> None:
    for found in run_workers(_functions, 2):
        assert {case: error for case, error in found.items() if not error <= TOLERANCE} == {}


class Hidden(nn.Module):
    """Returns what its weight gave in a class that nothing is known of: no hook gathers it before its
    gradient.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(80, width, dtype=torch.float64) / 80)

    def forward(self, x: Tensor) -> Any:
        return types.SimpleNamespace(y=x.flatten(1) @ self.weight)


class Unannounced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hidden(80), Hidden(60)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x).y.tanh()
        return types.SimpleNamespace(y=x)


class Forgetful(torch.autograd.Function):
    """Does not gather the weight that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_zeros(ctx.shape)


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[1].get_submodule("up").get_parameter("weight")
        y: Tensor = Forgetful.apply(self.layers[0](x), weight)
        return y


def _arrivals() -> float:
    rank = join()
    use_deepspeeds_placeholders()
    torch.manual_seed(1)
    plain, model = Unannounced(), Unannounced()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    engine, *_ = zlaunch.initialize(model=model, config=config(3, 2))
    for step in range(2):
        x = torch.randn(4, 8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain(x).y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x.chunk(2)[rank]).y.square().mean())
        assert all(p.shape == (0,) for p in model.parameters())
        engine.step()
    state, wanted = model.state_dict(), plain.state_dict()
    error = max(relative_error(state[name], wanted[name]) for name in wanted)
    engine.destroy()

    engine, *_ = zlaunch.initialize(model=Careless(), config=config(3, 2))
    loss = engine(torch.randn(2, WIDTH, dtype=torch.float64)).square().mean()
    with pytest.raises(
        RuntimeError, match=r"gradient of layers\.1\.up\.weight has shape \(0,\), but.*\(128, 32\)"
    ):
        engine.backward(loss)
    return error


def test_a_gradient_may_arrive_at_an_empty_placeholder() -> None:
    assert all(error <= TOLERANCE for error in run_workers(_arrivals, 2))
