"""Test linear layers in tiles: they compute what one layer does, and stage 3 gathers a tile at a time."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import batches, train_engine
from tests.runtime.workers import run_workers
from tests.runtime.zero.test_divided_blocks import (
    SAMPLES,
    STEPS,
    WIDTH,
    Stack,
    call_all,
    most_held,
    settings,
    trained_plainly,
)
from zlaunch.runtime.zero.policy import ShardingOptions, plan_blocks
from zlaunch.zero import TiledLinear, TiledLinearReturnBias


class Megatron(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


@given(st.data())
def test_tiles_compute_what_one_layer_does(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9))
    height = data.draw(st.integers(1, 9))
    in_splits = data.draw(st.integers(1, width))
    out_splits = data.draw(st.integers(1, height))
    bias = data.draw(st.booleans())
    is_split = data.draw(st.booleans())
    is_joined = data.draw(st.booleans())
    whole = nn.Linear(width, height, bias, dtype=torch.float64)
    tiled = TiledLinear(
        width,
        height,
        bias,
        in_splits,
        out_splits,
        is_split,
        is_joined,
        init_linear=whole,
        dtype=torch.float64,
    )
    first = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    second = first.detach().clone().requires_grad_()
    parts = second.split([b - a for a, b in pairwise(tiled.in_parts)], -1)
    found = tiled(parts if is_split else second)
    assert isinstance(found, Tensor) is is_joined and (is_joined or len(found) == out_splits)
    found = found if is_joined else torch.cat(found, -1)
    wanted = whole(first)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    outside = torch.randn_like(wanted)
    found.backward(outside)
    wanted.backward(outside)
    torch.testing.assert_close(second.grad, first.grad, rtol=1e-12, atol=1e-14)
    rows = [torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears]  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.cat(rows), whole.weight.grad, rtol=1e-12, atol=1e-14)
    names = {f"linears.{row}.{column}.weight" for row in range(out_splits) for column in range(in_splits)}
    biases = {f"linears.{row}.{in_splits - 1}.bias" for row in range(out_splits)} if bias else set()
    assert set(tiled.state_dict()) == names | biases


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_return_their_bias(bias: bool) -> None:
    whole = Megatron(6, 5, bias)
    tiled = TiledLinearReturnBias(6, 5, bias, 2, 3, linear_cls=Megatron, init_linear=whole)
    x = torch.randn(4, 6)
    product, returned = tiled(x)
    torch.testing.assert_close(product, x @ whole.weight.t())
    assert returned is None if whole.bias is None else torch.equal(returned, whole.bias)


def test_tiles_are_of_the_kind_of_the_layer_that_is_copied() -> None:
    whole = nn.Linear(4, 6, dtype=torch.bfloat16)
    whole.weight.requires_grad_(False)
    tiled = TiledLinear(4, 6, in_splits=2, out_splits=2, init_linear=whole)
    parameters = dict(tiled.named_parameters())
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    assert all(p.requires_grad is name.endswith("bias") for name, p in parameters.items())
    with torch.device("meta"):
        whole = nn.Linear(4, 6)
    assert all(p.is_meta for p in TiledLinear(4, 6, out_splits=2, init_linear=whole).parameters())


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(zlaunch.ParameterError, match=r"in_splits from 1 to in_features \(4\), got 5"):
        TiledLinear(4, 3, in_splits=5)
    with pytest.raises(zlaunch.ParameterError, match=r"out_splits from 1 to out_features \(3\), got 0"):
        TiledLinear(4, 3, out_splits=0)
    wrong: Any
    for wrong in (2.0, "2", True, None):
        with pytest.raises(zlaunch.ParameterError, match=re.escape(f"(4), got {wrong!r}")):
            TiledLinear(4, 3, in_splits=wrong)
    wrong = 2
    with pytest.raises(zlaunch.ParameterError, match="expected True or False as bias, got 2"):
        TiledLinear(4, 3, wrong, 2)
    for wrong in (nn.Sequential(), nn.Linear(4, 3).weight, None):
        with pytest.raises(zlaunch.ParameterError, match=f"weight and a bias, got {type(wrong).__name__}"):
            TiledLinear(4, 3).copy_params_from(wrong)
    with pytest.raises(zlaunch.ParameterError, match="meta device cannot hold the values of a layer on cpu"):
        TiledLinear(4, 3, init_linear=nn.Linear(4, 3), device="meta")
    with pytest.raises(zlaunch.ParameterError, match=r"shape \(3, 4\) and a bias, got \(4, 3\) and a bias"):
        TiledLinear(4, 3, init_linear=nn.Linear(3, 4))
    with pytest.raises(zlaunch.ParameterError, match=r"and a bias, got \(3, 4\) and no bias"):
        TiledLinear(4, 3, init_linear=nn.Linear(4, 3, bias=False))
    with pytest.raises(zlaunch.ParameterError, match="expected 2 inputs, got 3"):
        TiledLinear(4, 3, in_splits=2, input_is_already_split=True)(torch.randn(4).split([2, 1, 1]))


HEIGHT = WIDTH // 2
TILE = HEIGHT * WIDTH + HEIGHT
"""Counts the elements of a tile with its bias."""


def _tile(model: Stack) -> dict[str, TiledLinear]:
    """Replace each linear layer of the blocks by tiles; return these by name."""
    found = {}
    for layer in model.layers:
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        for name in names:
            parent, _, own = name.rpartition(".")
            whole = layer.get_submodule(name)
            sizes = whole.in_features, whole.out_features
            splits = {"in_splits": sizes[0] // WIDTH, "out_splits": sizes[1] // HEIGHT}
            tiled = TiledLinear(*sizes, **splits, init_linear=whole, dtype=torch.float64)
            layer.get_submodule(parent).add_module(own, tiled)
    for name, module in model.named_modules():
        if isinstance(module, TiledLinear):
            found[name] = module
    return found


def _joined(tiled: TiledLinear) -> dict[str, Tensor]:
    """Return the values as one layer has them."""
    rows: list[Any] = list(tiled.linears)
    weights = [torch.cat([tile.weight for tile in row], 1) for row in rows]
    return {"weight": torch.cat(weights), "bias": torch.cat([row[-1].bias for row in rows])}


def _trained() -> list[str]:
    zlaunch.init_distributed()
    plain = trained_plainly(call_all)
    data = batches(STEPS, SAMPLES)
    wrong = []
    for reentrant in (None, False, True):
        model = Stack(reentrant)
        call_all(model)
        tiled = _tile(model)
        engine, *_ = zlaunch.initialize(model=model, config=settings(stage3_unit_size=TILE))
        sizes = [unit.numel for unit in engine._sharded.units]
        assert len(tiled) == 24 and sum(TILE - 100 < size < TILE + 100 for size in sizes) == 3 * 24
        assert all(size < TILE + 100 for size in sizes[1:])
        train_engine(engine, data[:2])
        with most_held(engine) as most:
            train_engine(engine, data[2:])
        # The root, and blocks around parts, keep their own parameters while they compute.
        own = sum(size for size in sizes if size < 1000) + engine._sharded.blocks[0].numel
        if most[0] > 2 * max(sizes[1:]) + own:
            wrong.append(f"{reentrant}: {most[0]} elements of units up to {max(sizes[1:])}")
        engine.destroy()
        state = dict(model.state_dict())
        for name, module in tiled.items():
            state.update({f"{name}.{key}": value for key, value in _joined(module).items()})
        wrong += [
            f"{reentrant}: {key}"
            for key, value in plain.items()
            if not torch.allclose(state[key].cpu(), value, rtol=1e-9, atol=1e-11)
        ]
    return wrong


def test_a_layer_with_tiles_is_one_block_unless_it_is_too_large() -> None:
    model = Stack()
    _tile(model)
    options = ShardingOptions(shard_optimizer=True, shard_grads=True, shard_params=True)
    names = [block.name for block in plan_blocks(model, options)]
    assert names == ["root", "layers.0", "layers.1", "layers.2"]


@pytest.mark.multi_gpu
def test_tiles_are_gathered_in_turn_and_train_as_one_layer() -> None:
    assert run_workers(_trained, 2) == [[], []]


def _copied() -> bool:
    """Copy between sharded layers, whose values only the ranks together have."""
    zlaunch.init_distributed()
    with zlaunch.zero.Init(config=settings()):
        whole = nn.Linear(WIDTH, WIDTH)
        tiled = TiledLinear(WIDTH, WIDTH, in_splits=3, out_splits=2, init_linear=whole)
    x = torch.ones(WIDTH)
    with zlaunch.zero.GatheredParameters(whole), zlaunch.zero.GatheredParameters(tiled):
        return torch.allclose(tiled(x), whole(x), rtol=1e-5, atol=1e-6) and bool(tiled(x).any())


def test_values_of_a_sharded_layer_are_copied() -> None:
    assert run_workers(_copied, 2) == [True, True]
