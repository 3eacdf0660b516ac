"""Test activation checkpointing: numbers equal to the last bit, less memory, wherever the inputs wait."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zlaunch
from tests.runtime.models import (
    Layer,
    Net,
    batches,
    config,
    loss_of,
    net,
    relative_error,
    train_engine,
    with_forward,
)
from tests.runtime.workers import run_workers
from zlaunch.runtime.activation import checkpointing, offload
from zlaunch.runtime.activation.offload import ActivationPlacement
from zlaunch.runtime.config import load

checkpoint = zlaunch.checkpointing.checkpoint


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget(**place: Any) -> None:
    checkpointing._settings = checkpointing._Settings(place=ActivationPlacement(**place))
    offload.offload_cpu_tensors, offload.MINIMUM_NUMEL = False, 1024
    offload._rooms.clear()


def _offload_everything() -> None:
    _forget(in_cpu=True)
    offload.offload_cpu_tensors, offload.MINIMUM_NUMEL = True, 1


def _backward(model: nn.Module, batch: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Noisy(nn.Module):
    """A layer with dropout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.3, self.training)


def noisy() -> Net:
    """In double precision, so that a compiled one can be compared."""
    model = net(width=40, depth=4).double()  # wide enough for blocks of their own at stage 3
    model.layers = nn.ModuleList(Noisy(layer) for layer in model.layers)
    return model


# -- under the engine

OPTIONS: dict[str, dict[str, Any]] = {
    "enabled": {"enabled": True},
    "cpu": {"enabled": True, "cpu_checkpointing": True},
    "offloaded": {"enabled": True, "cpu_checkpointing": True},
    "two": {"enabled": True, "number_checkpoints": 2},
    "alone": {"enabled": True, "partition_activations": True},
    "compiled": {"enabled": True},
}


def _run(stage: int, option: str | None, micro: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and final weights of a few steps with dropout, and how often a block ran."""
    calls = [0]
    _offload_everything() if option == "offloaded" else _forget()
    model = noisy()
    if option == "compiled":
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    else:
        for layer in model.layers:
            layer.layer.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    section = {"activation_checkpointing": OPTIONS[option]} if option is not None else {}
    engine, *_ = zlaunch.initialize(
        model=model, config=config(stage, micro, accumulation=2, clip=0.5, **section)
    )
    torch.manual_seed(11 + engine.global_rank)
    losses = train_engine(engine, batches(3, 8))
    state = model.state_dict()
    engine.destroy()
    return losses, {name: value.clone() for name, value in state.items()}, calls[0]


def _compare(world: int) -> dict[str, tuple[bool, int, int]]:
    zlaunch.init_distributed()
    found = {}
    for stage in range(4):
        losses, state, plain_calls = _run(stage, None, 4 // world)
        for option in OPTIONS:
            got, weights, calls = _run(stage, option, 4 // world)
            same = got == losses and all(torch.equal(weights[n], state[n]) for n in state)
            if option == "compiled":  # its operations are other ones
                same = max(relative_error(weights[n], state[n]) for n in state) <= 1e-9
            found[f"{option}, stage {stage}"] = (same, calls, plain_calls)
    return found


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_every_option_trains_like_none(world: int) -> None:
    """Losses and weights are the same, to the last bit if not compiled; each such block runs twice a pass."""
    for found in run_workers(_compare, world, world):
        for name, (same, calls, plain_calls) in found.items():
            assert same, name
            if "compiled" not in name:
                assert calls == plain_calls * (1.5 if "two" in name else 2), name


def parameters_as_arguments(call: Callable[..., Any]) -> nn.Module:
    """A block's own parameter and another block's are given to a checkpointed function."""
    model = net(width=40)

    class Own(nn.Module):
        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return call(nn.functional.linear, self.layer(x), self.layer.down.weight @ self.layer.up.weight)

    model.layers = nn.ModuleList(Own(layer) for layer in model.layers)

    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for layer in model.layers:
            x = layer(x)
        x = call(nn.functional.linear, x, model.layers[0].layer.up.weight, bias=model.layers[1].layer.up.bias)
        x = call(lambda y, weight: y @ weight, x, weight=model.layers[2].layer.up.weight)
        return call(nn.functional.linear, model.norm(x), model.embedding.weight)

    del model.head
    return with_forward(model, forward)


def _parameters() -> list[bool]:
    zlaunch.init_distributed()
    same = []
    for stage in range(4):
        results = []
        for call in (lambda f, *a, **k: f(*a, **k), checkpoint):
            _offload_everything()
            engine, *_ = zlaunch.initialize(model=parameters_as_arguments(call), config=config(stage, 2))
            results.append((train_engine(engine, batches(3, 4)), engine.module.state_dict()))
        (losses, state), (got, weights) = results
        same.append(losses == got and all(torch.equal(weights[n], state[n]) for n in state))
    return same


@pytest.mark.rotated
def test_parameters_as_arguments() -> None:
    for same in run_workers(_parameters, 2):
        assert same == [True] * 4


def _gathered() -> float:
    zlaunch.init_distributed()
    section: dict[str, Any] = {"activation_checkpointing": {"enabled": True}}
    engine, *_ = zlaunch.initialize(model=net(width=64, depth=6), config=config(3, 4, **section))
    data = batches(3, 8)
    train_engine(engine, data[:2])
    engine.comm.moved.clear()
    train_engine(engine, data[2:])
    return engine.comm.moved["all_gather"] / sum(unit.numel for unit in engine.units)


def test_stage_3_gathers_no_more() -> None:
    assert max(run_workers(_gathered, 2)) <= 2.0


def _meet() -> None:
    """What the script said holds where the config says nothing."""
    public, settings = zlaunch.checkpointing, checkpointing._settings
    nothing: dict[str, Any] = {}
    for section in (nothing, {"activation_checkpointing": {"enabled": False}}):
        assert not public.is_configured()
        model = net(depth=4)
        zlaunch.initialize(model=model, config=config(0, 1, **section))
        assert _checkpointed(model) == []
    assert public.is_configured()
    public.configure(None, checkpoint_in_cpu=True, num_checkpoints=3)
    model = net(depth=4)
    zlaunch.initialize(model=model, config=config(0, 1, activation_checkpointing={"enabled": True}))
    assert _checkpointed(model) == [0, 1, 2] and settings.place.in_cpu
    own = {"enabled": True, "number_checkpoints": 2, "cpu_checkpointing": False}
    model = net(depth=4)
    engine, *_ = zlaunch.initialize(model=model, config=config(0, 1, activation_checkpointing=own))
    assert _checkpointed(model) == [0, 2] and settings.place.in_cpu
    assert not engine.comm.activations.place.in_cpu
    given = {"activation_checkpointing": {"number_checkpoints": 1, "cpu_checkpointing": True}}
    public.configure(None, given, checkpoint_in_cpu=False)
    assert settings.number == 1 and not settings.place.in_cpu
    public.reset()
    assert public.is_configured() and settings.number == 1


def test_config_and_configure_meet() -> None:
    run_workers(_meet, 1)
    keys = ("enabled", "partition_activations", "cpu_checkpointing", "number_checkpoints")
    assert not load(
        {"activation_checkpointing": dict.fromkeys(keys, True) | {"number_checkpoints": 2}}
    ).warnings


class _Counted(offload.Segment):
    """Counts the checkpointed calls whose inputs wait in host memory."""

    made = 0

    def __init__(self, place: ActivationPlacement) -> None:
        super().__init__(place)
        _Counted.made += place.in_cpu


def _own() -> list[int]:
    """Count, for engines in turn, the calls whose inputs wait in host memory."""
    vars(checkpointing)["Segment"] = _Counted
    sections: list[dict[str, Any]] = [
        {"enabled": True, "cpu_checkpointing": True, "number_checkpoints": 2},
        {"enabled": True},
    ]
    engines = [
        zlaunch.initialize(model=net(depth=3), config=config(0, 2, activation_checkpointing=section))[0]
        for section in sections
    ]
    found = []
    for engine in (*engines, *engines):
        before = _Counted.made
        engine.backward(loss_of(engine, batches(1, 2)[0]))
        engine.step()
        found.append(_Counted.made - before)
    for engine in engines:
        engine.destroy()
    assert not zlaunch.checkpointing.is_configured()
    again = config(0, 2, activation_checkpointing=sections[1])
    engine, *_ = zlaunch.initialize(model=net(depth=3), config=again)
    zlaunch.checkpointing.configure(None, checkpoint_in_cpu=True)  # for the engine that there is as well
    loss_of(engine, batches(1, 2)[0])
    return [*found, _Counted.made - before]


def test_settings_of_a_config_are_those_of_its_engine() -> None:
    assert run_workers(_own, 1) == [[2, 0, 2, 0, 3]]


def test_an_mpu_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"mpu_: int has no get_model_parallel_group"):
        zlaunch.checkpointing.configure(3)


def test_partitioning_alone_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        zlaunch.checkpointing.configure(None, partition_activations=True)
    assert capsys.readouterr().out.count("warning: partition_activations has no effect") == 1


# -- blocks


def _checkpointed(model: Net) -> list[int]:
    return [i for i, layer in enumerate(model.layers) if "forward" in layer.__dict__]


@pytest.mark.parametrize(
    ("number", "chosen"),
    [(None, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5]), (3, [0, 2, 4]), (4, [0, 1, 3, 4])],
)
def test_number_of_checkpoints(number: int | None, chosen: list[int]) -> None:
    model = net(depth=6)
    zlaunch.checkpointing.checkpoint_blocks(model, 5)
    names = zlaunch.checkpointing.checkpoint_blocks(model, number)
    assert names == [f"layers.{i}" for i in chosen]
    assert _checkpointed(model) == chosen
    ran: list[int] = []
    for index, layer in enumerate(model.layers):
        layer.up.register_forward_hook(lambda *_, index=index: ran.append(index))
    want = _backward(net(depth=6), batches(1, 4)[0])
    assert _equal(_backward(model, batches(1, 4)[0]), want)
    assert ran == [0, 1, 2, 3, 4, 5, *chosen[::-1]]
    assert zlaunch.checkpointing.checkpoint_blocks(model, 0) == []
    assert _checkpointed(model) == []


def test_blocks_stay_what_they_were() -> None:
    model, plain = net(), net()
    keys = list(model.state_dict())
    zlaunch.checkpointing.checkpoint_blocks(model)
    layer = model.layers[0]
    assert type(layer) is Layer and list(model.state_dict()) == keys
    assert inspect.signature(layer.forward) == inspect.signature(plain.layers[0].forward)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    want = _backward(plain, batches(1, 4)[0])
    for other in copies:
        mine = other.layers[0].forward
        assert isinstance(mine, functools.partial)
        assert mine.func.__self__ is other.layers[0]  # type: ignore[attr-defined]  # a method
        assert _equal(_backward(other, batches(1, 4)[0]), want)
    assert all(p.grad is None for p in model.parameters())
    zlaunch.checkpointing.checkpoint_blocks(copies[0])  # a copy can be wrapped itself
    assert _equal(_backward(copies[0], batches(1, 4)[0]), want)


def test_a_forward_of_the_instance_is_kept() -> None:
    model, plain = net(), net()
    for one in (model, plain):
        layer = one.layers[1]
        layer.forward = lambda x, layer=layer: 2 * Layer.forward(layer, x)
    own = model.layers[1].forward
    zlaunch.checkpointing.checkpoint_blocks(model)
    assert _equal(_backward(model, batches(1, 4)[0]), _backward(plain, batches(1, 4)[0]))
    zlaunch.checkpointing.checkpoint_blocks(model, 0)
    assert model.layers[1].forward is own


def test_plain_without_gradients_or_training() -> None:
    _offload_everything()
    model = net()
    zlaunch.checkpointing.checkpoint_blocks(model)
    calls = [0]
    for layer in model.layers:
        layer.up.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    with torch.no_grad():
        loss_of(model, batches(1, 4)[0])
    loss_of(model.eval(), batches(1, 4)[0]).backward()
    assert calls[0] == 6 and offload._rooms == {}


@pytest.mark.parametrize("where", ["model", "block", "inside"])
def test_blocks_with_checkpointing_of_their_own(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    {"model": model, "block": model.layers[1], "inside": model.layers[1].up}[
        where
    ].gradient_checkpointing = True
    names = zlaunch.checkpointing.checkpoint_blocks(model)
    assert names == ([] if where == "model" else ["layers.0", "layers.2"])
    left = 3 if where == "model" else 1
    assert f"warning: skipped {left} blocks" in capsys.readouterr().out


def test_caches_are_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = net()
    model.config = model.layers[0].config = types.SimpleNamespace(use_cache=True)
    zlaunch.checkpointing.checkpoint_blocks(model, 0)
    assert model.config.use_cache
    zlaunch.checkpointing.checkpoint_blocks(model)
    assert not model.config.use_cache
    assert capsys.readouterr().out.count("warning: set use_cache=False") == 1


def test_which_modules_are_blocks() -> None:
    sequence = nn.Sequential(nn.Sequential(Layer(8), nn.ReLU()), Layer(8), nn.Linear(8, 8))
    assert zlaunch.checkpointing.checkpoint_blocks(sequence) == ["0.0", "1"]
    with pytest.raises(ValueError, match="found no blocks to checkpoint"):
        zlaunch.checkpointing.checkpoint_blocks(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="0 or more, got -1"):
        zlaunch.checkpointing.checkpoint_blocks(net(), -1)


# -- calls


@dataclasses.dataclass
class Output:
    hidden: Tensor
    note: str


def _all_kinds(
    x: Tensor, weight: nn.Parameter, scale: float, pair: tuple[Tensor, Tensor], *, mask: Tensor
) -> Output:
    a, b = pair
    return Output(torch.tanh(nn.functional.dropout(x * a, 0.5) @ weight) * scale + mask * b, "text")


@pytest.mark.parametrize("offloaded", [False, True])
def test_any_argument_and_result(offloaded: bool) -> None:
    """Keywords, numbers, tensors in tuples, parameters, no gradient needed; in and out of each other."""
    if offloaded:
        _offload_everything()
    torch.manual_seed(1)
    weight, mask = nn.Parameter(torch.randn(6, 6)), torch.randn(6)
    given = torch.randn(5, 6, requires_grad=True)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(2)
        weight.grad = given.grad = None
        x = given.sin()
        first = call(_all_kinds, torch.ones(5, 6), weight, 2.0, (x, x), mask=mask).hidden
        second = call(_all_kinds, x.t().contiguous().t(), weight, 0.5, (first, x), mask=mask.expand(5, 6))
        assert second.note == "text"
        nested = call(lambda y: call(torch.exp, call(torch.sin, y)).cos(), second.hidden)
        outer = torch_checkpoint(lambda y: call(torch.sin, y).exp(), nested, use_reentrant=False)
        loss = (call(_all_kinds, x=outer, weight=weight, scale=1.0, pair=(x, x), mask=mask).hidden ** 2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach(), weight.grad.clone(), given.grad.clone()]  # type: ignore[attr-defined]  # set by backward

    want = run(lambda function, *args, **kwargs: function(*args, **kwargs))
    assert _equal(run(checkpoint), want)
    assert _equal(run(zlaunch.checkpointing.non_reentrant_checkpoint), want)


@pytest.mark.parametrize("offloaded", [None, False, True])
def test_an_input_that_is_modified_is_an_error(offloaded: bool | None) -> None:
    if offloaded is not None:
        _offload_everything()
        offload.offload_cpu_tensors = offloaded
    x = torch.randn(4, 4, requires_grad=True).sin()
    y = checkpoint(lambda a: a.sin().cos(), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place)"):
        y.sum().backward()


def test_a_sequential_in_a_list_is_a_block_unless_it_holds_blocks() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)) for _ in range(2)
            )
            inner = torch.nn.TransformerEncoderLayer(4, 1, 4)
            self.stages = torch.nn.ModuleList([torch.nn.Sequential(inner, torch.nn.Linear(4, 4))])

    assert checkpointing.checkpoint_blocks(Net()) == ["layers.0", "layers.1", "stages.0.0"]
