"""Test blocks that are too large for one unit: divided by their modules, they train as plain torch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zlaunch
from tests.runtime.models import batches, config, loss_of, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.zero.policy import ShardingOptions, plan_blocks
from zlaunch.runtime.zero.unit import Unit

WIDTH = 96
UNIT = 30_000
"""A block has 112,000 elements, its largest module 19,000."""
STEPS = 3
SAMPLES = 8


class Attention(nn.Module):
    """Has a parameter besides its modules. With ``nests``, calls one in a checkpoint."""

    nests = False

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        found = torch.softmax(scores / WIDTH, -1) @ self.value(x) * self.scale
        return checkpoint(self.out, found, use_reentrant=False) if self.nests else self.out(found)


class Mlp(nn.Module):
    """Calls the members of a dict, and uses the weight of another module without a call, unless
    ``calls_all``.
    """

    calls_all = False

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, 2 * WIDTH) for name in ("gate", "up")})
        self.uncalled = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bent = torch.sigmoid(self.branches["gate"](x)) * self.branches["up"](x)
        uncalled = self.uncalled(x) if self.calls_all else x @ self.uncalled.weight.t() + self.uncalled.bias
        return self.down(bent + uncalled)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.between = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


def _products_are_saved() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


class Stack(nn.Module):
    """Calls its blocks plainly, or in torch's checkpoints, which may be selective."""

    selects = False

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(31, WIDTH)
        self.layers: Any = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 31)
        self.reentrant = reentrant
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            elif self.selects:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=_products_are_saved)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def tie(model: Stack) -> None:
    """Tie weights inside a block, and between two."""
    first = model.layers[0]
    second = model.layers[1]
    first.attention.key.weight = first.attention.query.weight
    second.mlp.down.weight = first.mlp.down.weight


def freeze(model: Stack) -> None:
    """Train a module of each block, and nothing of the last."""
    model.requires_grad_(False)
    for layer in model.layers[:2]:
        layer.mlp.branches["up"].requires_grad_(True)
    model.embedding.requires_grad_(True)


def select(model: Stack) -> None:
    """Save the products of matrices in checkpoints."""
    model.selects = True


def nothing(model: Stack) -> None:
    """Leave a model as it is."""


def test_the_parts_of_a_block() -> None:
    model = Stack()
    tie(model)
    options = ShardingOptions(shard_optimizer=True, shard_grads=True, shard_params=True, divided_numel=10_000)
    parts = {block.name: [name for name, _ in block.parameters] for block in plan_blocks(model, options)}
    found = {name.removeprefix("layers.0"): own for name, own in parts.items() if name.startswith("layers.0")}
    of = "layers.0"
    assert found == {
        "": [f"{of}.before.weight", f"{of}.before.bias", f"{of}.between.weight", f"{of}.between.bias"],
        # key and query share a weight, and their biases are too small to be parts
        ".attention": [
            f"{of}.attention.{name}" for name in ("scale", "query.weight", "query.bias", "key.bias")
        ],
        ".attention.value": [f"{of}.attention.value.weight", f"{of}.attention.value.bias"],
        ".attention.out": [f"{of}.attention.out.weight", f"{of}.attention.out.bias"],
        ".mlp": [f"{of}.mlp.down.bias"],  # the weight is another block's, too: it is in the root
        ".mlp.branches.gate": [f"{of}.mlp.branches.gate.weight", f"{of}.mlp.branches.gate.bias"],
        ".mlp.branches.up": [f"{of}.mlp.branches.up.weight", f"{of}.mlp.branches.up.bias"],
        ".mlp.uncalled": [f"{of}.mlp.uncalled.weight", f"{of}.mlp.uncalled.bias"],
    }


def settings(**zero: Any) -> dict[str, Any]:
    zero = {"stage3_unit_size": UNIT, "stage3_prefetch_bucket_size": 1, **zero}
    return config(3, SAMPLES // 2, clip=0.5, zero=zero)


def trained_plainly(change: Callable[[Stack], None]) -> dict[str, Tensor]:
    model = Stack()
    change(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1
    )
    for tokens in batches(STEPS, SAMPLES):
        loss_of(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@contextmanager
def most_held(engine: Any) -> Iterator[list[int]]:
    """Note the most elements that sharded units have memory for at one time."""
    units = [unit for unit in engine._sharded.units if unit.shard_params]
    most = [0]
    plain = Unit.unshard

    def unshard(self: Unit, *, rounded: bool = False) -> None:
        plain(self, rounded=rounded)
        most[0] = max(most[0], sum(unit._storage.nbytes() // unit.dtype.itemsize for unit in units))

    Unit.unshard = unshard  # type: ignore[method-assign]
    yield most
    Unit.unshard = plain  # type: ignore[method-assign]


def differences(engine: Any, plain: dict[str, Tensor]) -> list[str]:
    """Name the parameters that differ."""
    engine.destroy()
    trained = engine.module.state_dict()
    return [key for key in plain if not torch.allclose(trained[key].cpu(), plain[key], rtol=1e-9, atol=1e-11)]


@dataclass(frozen=True)
class Case:
    """Says which of torch's checkpoints the model uses, and what the config has besides."""

    reentrant: bool | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {**settings(**self.zero), **self.rest}


CASES = {
    "plain": Case(),
    "checkpoint": Case(reentrant=False),
    "reentrant": Case(reentrant=True),
    "configured": Case(rest={"activation_checkpointing": {"enabled": True}}),
    "host": Case(False, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "far ahead": Case(False, {"stage3_prefetch_bucket_size": 10**7}),
    "none ahead": Case(False, {"stage3_prefetch_bucket_size": 0}),
}


def _trained(names: list[str], change: Callable[[Stack], None]) -> list[str]:
    zlaunch.init_distributed()
    plain = trained_plainly(change)
    wrong = []
    for name in names:
        model = Stack(CASES[name].reentrant)
        change(model)
        engine, *_ = zlaunch.initialize(model=model, config=CASES[name].config())
        assert sum(block.around is not None for block in engine._sharded.blocks) >= 24
        train_engine(engine, batches(STEPS, SAMPLES))
        wrong += [f"{name}: {key}" for key in differences(engine, plain)]
    return wrong


@pytest.mark.multi_gpu
def test_divided_blocks_train_as_plain_torch() -> None:
    assert run_workers(_trained, 2, list(CASES), nothing) == [[], []]


@pytest.mark.rotated
@pytest.mark.parametrize("change", [tie, freeze])
def test_tied_and_frozen_parameters(change: Callable[[Stack], None]) -> None:
    assert run_workers(_trained, 2, ["plain", "checkpoint", "reentrant"], change) == [[], []]


def test_selective_checkpoints() -> None:
    assert run_workers(_trained, 2, ["checkpoint", "far ahead", "none ahead"], select) == [[], []]


def call_all(model: Stack) -> None:
    """Use no module's weight without a call."""
    for layer in model.layers:
        layer.mlp.calls_all = True


def call_all_frozen(model: Stack) -> None:
    call_all(model)
    freeze(model)


def _held() -> list[str]:
    zlaunch.init_distributed()
    wrong = []
    at_once: list[tuple[str, Callable[[Stack], None], int]] = [
        *((name, call_all, 2) for name in ("plain", "checkpoint", "reentrant", "configured")),
        # a module that is used without a call is gathered with the block around it
        ("plain", nothing, 3),
        ("plain", call_all_frozen, 2),
        # a frozen part has been used without a recomputation, and waits for the next one's gradient
        ("checkpoint", call_all_frozen, 3),
    ]
    for name, change, allowed in at_once:
        model = Stack(CASES[name].reentrant)
        change(model)
        engine, *_ = zlaunch.initialize(model=model, config=CASES[name].config())
        train_engine(engine, batches(2, SAMPLES))  # the order of use is known then
        with most_held(engine) as most:
            train_engine(engine, batches(1, SAMPLES))
        units = engine._sharded.units
        largest = max(unit.numel for unit in units)
        # The root, and blocks around parts, keep their own parameters while they compute.
        own = sum(unit.numel for unit in units if unit.numel < 1000) + engine._sharded.blocks[0].numel
        if not largest < most[0] <= allowed * largest + own:
            wrong.append(f"{name} {change.__name__}: {most[0]} of units up to {largest}")
        engine.destroy()
    return wrong


def test_two_parts_are_gathered_at_one_time() -> None:
    assert run_workers(_held, 2) == [[], []]


def _interrupted() -> list[str]:
    zlaunch.init_distributed()
    plain = trained_plainly(nothing)
    data = batches(STEPS, SAMPLES)
    wrong = []
    for reentrant, nests, first in [
        *((None, False, 1), (False, False, 1), (False, False, 2), (False, True, 1), (False, True, 2)),
        *((True, False, 1), (True, False, 2)),
    ]:
        model = Stack(reentrant)
        for layer in model.layers:
            layer.attention.nests = nests
        engine, *_ = zlaunch.initialize(model=model, config=settings())
        train_engine(engine, data[:1])
        calls = 0

        def interrupt(module: nn.Module, args: Any, first: int = first) -> None:
            nonlocal calls
            calls += 1
            if calls == first:  # the second call is the recomputation
                raise KeyboardInterrupt

        handle = model.layers[1].attention.out.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss_of(engine, data[1][:4]))
        handle.remove()
        engine.zero_grad()
        train_engine(engine, data[1:])
        wrong += [f"{reentrant} {nests} {first}: {key}" for key in differences(engine, plain)]
    return wrong


def test_an_interrupted_part_leaves_nothing_behind() -> None:
    assert run_workers(_interrupted, 2) == [[], []]


def _saved_and_loaded(folder: str) -> list[str]:
    zlaunch.init_distributed()
    data = batches(STEPS, SAMPLES)
    wrong = []
    for first, second in ((UNIT, 10**9), (10**9, UNIT)):
        engine, *_ = zlaunch.initialize(model=Stack(), config=settings(stage3_unit_size=first))
        train_engine(engine, data[:1])
        engine.save_checkpoint(folder, tag=f"of {first}")
        engine.destroy()
        engine, *_ = zlaunch.initialize(model=Stack(), config=settings(stage3_unit_size=second))
        engine.load_checkpoint(folder, tag=f"of {first}")
        train_engine(engine, data[1:])
        wrong += [f"{first}: {key}" for key in differences(engine, trained_plainly(nothing))]
    return wrong


def test_checkpoints_do_not_depend_on_the_division(tmp_path: Path) -> None:
    assert run_workers(_saved_and_loaded, 2, str(tmp_path)) == [[], []]
