"""Test what a graph and a script still hold of a unit after it was freed (stage 3)."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Layer, batches, config, net, relative_error
from tests.runtime.workers import join, run_workers

TOLERANCE = 1e-9
WIDTH = 16


def options(stage: int = 3, **extra: Any) -> dict[str, Any]:
    """A config with even the smallest blocks sharded."""
    return config(stage, 2, zero={"stage3_module_granularity_threshold": 0}, **extra)


class Positions(nn.Module):
    """Gives a view of its own parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.pe = nn.Parameter(torch.randn(1, 12, WIDTH, dtype=torch.float64))

    def forward(self, n: int) -> Any:
        views: dict[str, Callable[[], Any]] = {
            "slice": lambda: self.pe[:, :n],
            "index": lambda: self.pe[0][:n],
            "expand": lambda: self.pe[:, :n].expand(1, n, WIDTH),
            "detach": lambda: self.pe.detach()[:, :n],
            "tuple": lambda: (self.pe[:, :n], None),
            "itself": lambda: self.pe,
            "space": lambda: types.SimpleNamespace(pe=self.pe[:, :n]),
        }
        return views[self.kind]()


class Viewing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions = Positions(kind)
        self.layers = nn.ModuleList(Layer(WIDTH).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        pe = self.positions(x.shape[1])
        pe = pe[0] if isinstance(pe, tuple) else getattr(pe, "pe", pe)
        x = x + pe[..., : x.shape[1], :]
        for layer in self.layers:
            x = layer(x)
        return x


KINDS = ("slice", "index", "expand", "detach", "tuple", "itself", "space")


def _views() -> dict[str, float]:
    rank = join()
    found = {}
    for kind in KINDS:
        torch.manual_seed(1)
        plain, model = Viewing(kind), Viewing(kind)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
        engine, *_ = zlaunch.initialize(model=model, config=options())
        worst = 0.0
        for step in range(3):
            x = torch.randn(4, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(x.chunk(2)[rank]).square().mean())
            engine.step()
            engine.eval()
            with torch.no_grad():
                worst = max(worst, relative_error(engine(x), plain(x)))
                kept = model.positions(4)  # read after the unit was freed
                kept = kept[0] if isinstance(kept, tuple) else getattr(kept, "pe", kept)
                wanted = plain.positions(4)
                wanted = wanted[0] if isinstance(wanted, tuple) else getattr(wanted, "pe", wanted)
                if kind != "itself":
                    worst = max(worst, relative_error(kept, wanted))
            engine.train()
        state, wanted = model.state_dict(), plain.state_dict()
        found[kind] = max(worst, *(relative_error(state[n], wanted[n]) for n in wanted))
        engine.destroy()
    return found


def test_a_view_of_a_parameter_outlives_its_unit() -> None:
    for found in run_workers(_views, 2):
        assert {kind: error for kind, error in found.items() if not error <= TOLERANCE} == {}


# -- outputs in which no tensor can be found


class Own:
    """A class that nothing is known of."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Any], Tensor]]] = {
    "namespace": (lambda y: types.SimpleNamespace(y=y), lambda out, model: out.y),
    "slots": (Own, lambda out, model: out.value),
    "nothing": (lambda y: None, lambda out, model: model.kept),
    "detached": (lambda y: y.detach(), lambda out, model: model.kept),
}


class Odd(nn.Module):
    """Returns its result as an unknown class, from the root and from every block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(OddLayer(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = OUTPUTS[self.kind][1](layer(x), layer)
        self.kept = self.head(x)
        return OUTPUTS[self.kind][0](self.kept)


class OddLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, Layer(WIDTH).double()
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        self.kept = self.layer(x)
        return OUTPUTS[self.kind][0](self.kept)


def _outputs() -> dict[str, float]:
    rank = join()
    found = {}
    for kind, (_, take) in OUTPUTS.items():
        torch.manual_seed(1)
        plain, model = Odd(kind), Odd(kind)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
        engine, *_ = zlaunch.initialize(model=model, config=options())
        for step in range(3):
            x = torch.randn(4, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            take(plain(x), plain).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            take(engine(x.chunk(2)[rank]), model).square().mean().backward()
            engine.step()
        state, wanted = model.state_dict(), plain.state_dict()
        found[kind] = max(relative_error(state[n], wanted[n]) for n in wanted)
        engine.destroy()
    return found


def test_outputs_of_unknown_classes() -> None:
    for found in run_workers(_outputs, 2):
        assert {kind: error for kind, error in found.items() if not error <= TOLERANCE} == {}


# -- backward passes that do not begin at the root's output


def _passes() -> dict[str, float]:
    rank = join()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return model(x).square().mean() + grad.square().mean()

    def inner(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return plain_or(model).kept.square().mean()

    def vmapped(model: nn.Module, x: Tensor) -> Tensor:
        return torch.vmap(plain_or(model).layers[1])(x).square().mean() + model(x).mean()

    def method(model: nn.Module, x: Tensor) -> Tensor:
        own = plain_or(model)
        return own.compute_loss(x)

    def plain_or(model: nn.Module) -> Any:
        return model.module if hasattr(model, "_sharded") else model

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(WIDTH).double() for _ in range(3))
            self.kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x)
                if index == 1:
                    self.kept = x
            return x

        def compute_loss(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    found = {}
    losses = {"penalty": penalty, "inner": inner, "vmap": vmapped, "method": method}
    for stage in (1, 3):
        for name, loss in losses.items():
            torch.manual_seed(1)
            plain, model = Stack(), Stack()
            model.load_state_dict(plain.state_dict())
            optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
            engine, *_ = zlaunch.initialize(model=model, config=options(stage))
            for _ in range(3):
                x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
                loss(plain, x).backward()
                if name == "penalty":  # a mean of squares of a sum's gradient does not split over the batch
                    plain.zero_grad()
                    halves = [loss(plain, half) for half in x.chunk(2)]
                    (torch.stack(halves).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.backward(loss(engine, x.chunk(2)[rank]))
                engine.step()
            state, wanted = model.state_dict(), plain.state_dict()
            found[f"{name} {stage}"] = max(relative_error(state[n], wanted[n]) for n in wanted)
            engine.destroy()
    return found


@pytest.mark.rotated
def test_passes_that_begin_elsewhere() -> None:
    for found in run_workers(_passes, 2):
        assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def _stale() -> None:
    """A backward pass of a forward pass from before the step, as torch refuses it."""
    zlaunch.init_distributed()
    for stage in (0, 1, 2, 3):
        for section in ({}, {"bf16": {"enabled": True}}):
            engine, *_ = zlaunch.initialize(model=net(), config=options(stage, **section))
            tokens = batches(1, 2)[0]
            old = engine(tokens).float().sum()
            engine.backward(engine(tokens).float().square().mean())
            engine.step()
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|needs the value of"):
                old.backward()
            engine.zero_grad()
            x = engine(tokens)
            if stage == 3:  # the check that autograd makes without hooks holds for activations, too
                y = torch.tanh(model_of(engine).layers[0](model_of(engine).embedding(tokens)))
                z = y * y
                with torch.no_grad():
                    y.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    z.float().sum().backward()
            del x
            engine.destroy()


def model_of(engine: Any) -> Any:
    """The module of an engine."""
    return engine.module


def test_a_graph_from_before_a_step_is_refused() -> None:
    run_workers(_stale, 1)


def _memory() -> None:
    """A freed unit's memory is given back although the graph has saved its weights."""
    zlaunch.init_distributed()
    model = net(depth=4)
    engine, *_ = zlaunch.initialize(model=model, config=options())
    loss = engine(batches(1, 2)[0]).square().mean()
    full = [unit for unit in engine.units if unit._storage.nbytes()]
    assert len(full) <= 3, [unit.name for unit in full]  # the root, and the last block
    held = model.layers[0].up.weight
    del held
    engine.backward(loss)
    engine.step()
    gc.collect()
    assert not any(unit._storage.nbytes() for unit in engine.units if unit.shard_params)


def test_memory_is_given_back() -> None:
    run_workers(_memory, 1)


def _transforms() -> dict[str, float]:
    """torch.func inside a forward pass, with units that stay whole until the backward pass is over."""
    rank = join()

    class Inside(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.layers = nn.ModuleList(Layer(WIDTH).double() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.kind == "grad":
                    x = x + torch.func.grad(lambda y, layer=layer: layer(y).square().sum())(x)
                elif self.kind == "vjp":
                    value, back = torch.func.vjp(layer, x)[:2]
                    x = value + back(torch.ones_like(value))[0]
                elif self.kind == "jvp":
                    value, slope = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[:2]
                    x = value + slope
                else:
                    jacobian = torch.func.vmap(torch.func.jacrev(lambda y, layer=layer: layer(y).sum(-1)))
                    x = layer(x) + jacobian(x).square().mean()
            return x

    found = {}
    for kind in ("grad", "vjp", "jvp", "jacrev"):
        torch.manual_seed(1)
        plain, model = Inside(kind), Inside(kind)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
        settings = {k: v for k, v in options().items() if k != "optimizer"}
        engine, *_ = zlaunch.initialize(
            model=model, config=settings, optimizer=lambda p: torch.optim.SGD(p, lr=1e-4)
        )
        for _ in range(3):
            x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
            torch.stack([plain(half).square().mean() for half in x.chunk(2)]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(x.chunk(2)[rank]).square().mean())
            engine.step()
        state, wanted = model.state_dict(), plain.state_dict()
        found[kind] = max(relative_error(state[n], wanted[n]) for n in wanted)
        engine.destroy()
    return found


@pytest.mark.rotated
def test_transforms_inside_a_forward_pass() -> None:
    for found in run_workers(_transforms, 2, env={"ZLAUNCH_SAVED_TENSOR_HOOKS": "0"}):
        assert {kind: error for kind, error in found.items() if not error <= TOLERANCE} == {}
