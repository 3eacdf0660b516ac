"""Test calls in an unusual order and changes at an unusual moment: right, or refused; never wrong."""

from __future__ import annotations

import contextlib
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.handles.test_optimizer import TOLERANCE, _adam, options, worst
from tests.runtime.models import Layer, batches, loss_of, net, relative_error
from tests.runtime.workers import run_workers
from zlaunch.runtime.zero import saved_tensors


def _destroyed(folder: str) -> None:
    zlaunch.init_distributed()
    for stage in (1, 3):
        engine, *_ = zlaunch.initialize(model=net(), config=_with_adam(stage))
        engine.backward(loss_of(engine, batches(1, 2)[0]))
        engine.step()
        engine.save_checkpoint(folder)
        engine.destroy()
        before = [p.detach().clone() for p in engine.module.parameters()]
        for call in (engine.load_checkpoint, engine.save_checkpoint, engine.save_16bit_model):
            with pytest.raises(RuntimeError, match="was destroyed"):
                call(folder)
        assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
        assert {type(p) for p in engine.module.parameters()} == {nn.Parameter}


def _with_adam(stage: int, **extra: Any) -> dict[str, Any]:
    return {**options(stage, **extra), "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}


def test_a_destroyed_engine_saves_and_loads_nothing(tmp_path: Path) -> None:
    run_workers(_destroyed, 1, str(tmp_path))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(24), Layer(24)

    def encode(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def _unfrozen_late() -> None:
    """Unfreeze parameters before a pass by another method, and between a forward and its backward pass."""
    zlaunch.init_distributed()
    for stage in (0, 3):
        torch.manual_seed(1)
        plain, model = Encoder().double(), Encoder().double()
        model.load_state_dict(plain.state_dict())
        for each in (plain, model):
            each.first.requires_grad_(False)
        theirs, mine = _adam(plain), _adam(model)
        engine, *_ = zlaunch.initialize(model=model, optimizer=mine, config=options(stage))
        for step in range(4):
            for each in (plain, model):
                each.first.requires_grad_(step >= 1)
            x = torch.randn(2, 24, dtype=torch.float64)
            plain.encode(x).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
            engine.backward(model.encode(x).square().mean())
            engine.step()
        assert worst(model, plain) <= TOLERANCE, stage
        engine.destroy()

        model.first.requires_grad_(False)
        mine = _adam(model)
        engine, *_ = zlaunch.initialize(model=model, optimizer=mine, config=options(stage))
        x = torch.randn(2, 24, dtype=torch.float64)

        def unfreeze(*args: Any, model: Encoder = model) -> None:
            model.first.requires_grad_(True)

        handle = model.first.register_forward_pre_hook(unfreeze)
        engine.backward(engine(x).square().mean())
        handle.remove()
        with pytest.raises(zlaunch.ParameterError, match=r"first.* was unfrozen after"):
            engine.step()
        with pytest.raises(zlaunch.ParameterError, match=r"first.* has a gradient from before"):
            engine(x)
        mine.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.destroy()


def test_parameters_unfrozen_late_are_trained_or_refused() -> None:
    run_workers(_unfrozen_late, 1)


def _resumed(folder: str) -> float:
    """Saved after unfreezing, loaded into a model that is unfrozen just before."""
    zlaunch.init_distributed()
    models = []
    for resumed in (False, True):
        model = net().double()
        model.layers[0].requires_grad_(False)
        engine, *_ = zlaunch.initialize(model=model, optimizer=_adam(model), config=options(3))
        for step, batch in enumerate(batches(6, 2)):
            if step == 2:
                model.layers[0].requires_grad_(True)
            if step == 4 and resumed:
                model = net().double()
                model.layers[0].requires_grad_(False)
                engine, *_ = zlaunch.initialize(model=model, optimizer=_adam(model), config=options(3))
                model.layers[0].requires_grad_(True)
                engine.load_checkpoint(folder)
            engine.backward(loss_of(engine, batch))
            engine.step()
            if step == 3:
                engine.save_checkpoint(folder)
        models.append(engine.module.state_dict())
    return max(relative_error(models[1][name], models[0][name]) for name in models[0])


def _warned(folder: str) -> str:
    """Loaded before unfreezing: what is not loaded is said."""
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=_with_adam(1))
    engine.backward(loss_of(engine, batches(1, 2)[0]))
    engine.step()
    engine.save_checkpoint(folder)
    model = net()
    model.layers[0].requires_grad_(False)
    engine, *_ = zlaunch.initialize(model=model, config=_with_adam(1))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="frozen")
    engine, *_ = zlaunch.initialize(model=net(), config=_with_adam(1))
    with contextlib.redirect_stdout(printed):
        engine.load_checkpoint(folder, tag="frozen")
    return printed.getvalue()


def test_state_of_frozen_parameters_that_is_not_loaded_is_said(tmp_path: Path) -> None:
    (text,) = run_workers(_warned, 1, str(tmp_path))
    assert "optimizer state of 6 frozen parameters is not loaded (layers.0." in text
    assert "frozen has no optimizer state of 6 parameters that were frozen and train now (layers.0." in text


def test_unfrozen_parameters_get_their_state_back(tmp_path: Path) -> None:
    assert run_workers(_resumed, 1, str(tmp_path)) == [0.0]


class Writing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers: Any = nn.ModuleList([Layer(24), Layer(24)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _written_within() -> None:
    zlaunch.init_distributed()
    for how in ("no_grad", "data"):
        model = Writing(how)

        def write(layer: Any, args: Any, how: str = how) -> None:
            if how == "data":
                layer.up.weight.data.mul_(0.5)
            else:
                with torch.no_grad():
                    layer.up.weight.mul_(0.5)

        engine, *_ = zlaunch.initialize(model=model, config=_with_adam(3))
        handle = model.layers[0].register_forward_pre_hook(write)
        with pytest.raises(zlaunch.ParameterError, match=r"changed in place while gathered"):
            engine(torch.randn(2, 24))
            engine.zero_grad()
            engine._sharded.reshard_all()
        handle.remove()
        weight = model.layers[1].up.weight
        with (
            pytest.raises(zlaunch.ParameterError, match="modifier_rank=0"),
            zlaunch.zero.GatheredParameters([weight]),
            torch.no_grad(),
        ):
            weight.zero_()
        with zlaunch.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.zero_()
        with zlaunch.zero.GatheredParameters([weight]):
            assert not weight.any()


def test_what_is_written_while_gathered_is_not_lost_silently() -> None:
    run_workers(_written_within, 1)


def _swapped_and_replaced() -> None:
    zlaunch.init_distributed()
    model = net()
    tokens = batches(1, 2)[0]
    engine, *_ = zlaunch.initialize(model=model, config=_with_adam(3))
    torch.utils.swap_tensors(model.layers[0].norm.weight, model.layers[0].norm.bias)
    with pytest.raises(zlaunch.ParameterError, match="is no longer in"):
        engine.save_checkpoint("never")

    model = net()
    model.layers[0].requires_grad_(False)
    engine, *_ = zlaunch.initialize(model=model, optimizer=_adam(model), config=options(1))
    model.head.weight = nn.Parameter(torch.ones(31, 24))
    model.layers[0].requires_grad_(True)
    with pytest.raises(zlaunch.ParameterError, match=r"head\.weight was replaced"):
        engine(tokens)


def test_swaps_and_replacements_are_seen_before_anything_is_regrouped() -> None:
    run_workers(_swapped_and_replaced, 1)


def _in_the_middle() -> None:
    """A group for parameters that have gradients already; another implementation of the step."""
    zlaunch.init_distributed()
    model = net()
    mine = _adam(model, parameters=list(model.layers.parameters()))
    engine, *_ = zlaunch.initialize(model=model, optimizer=mine, config=options(1, accumulation=2))
    tokens = batches(1, 2)[0]
    engine.backward(loss_of(engine, tokens))
    engine.step()
    with pytest.raises(zlaunch.OptimizerError, match=r"head\.weight already has gradients of this step"):
        mine.add_param_group({"params": [model.head.weight]})
    engine.backward(loss_of(engine, tokens))
    engine.step()
    mine.add_param_group({"params": [model.head.weight], "foreach": True})
    for _ in range(4):
        engine.backward(loss_of(engine, tokens))
        engine.step()


def test_groups_that_come_in_the_middle() -> None:
    run_workers(_in_the_middle, 1)


def _interrupted() -> None:
    """An interrupt in a call of the module itself, for which torch calls no hooks; two threads."""
    zlaunch.init_distributed()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=_with_adam(3))
    tokens = batches(1, 2)[0]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, tokens)
    handle.remove()
    engine.backward(loss_of(engine, tokens))
    engine.step()
    assert engine._sharded._pass.depth == 0
    assert saved_tensors.top() is None

    errors: list[str] = []

    def other(*args: Any) -> None:
        def call() -> None:
            try:
                loss_of(model, tokens)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = model.layers[1].register_forward_pre_hook(other)
    loss_of(engine, tokens)
    handle.remove()
    assert len(errors) == 1 and "another thread" in errors[0]

    cause = ValueError("why")

    def fails(*args: Any) -> None:
        raise RuntimeError("what") from cause

    model.layers[1].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="what") as caught:
        loss_of(engine, tokens)
    assert caught.value.__cause__ is cause


def test_interrupts_threads_and_causes() -> None:
    run_workers(_interrupted, 1)


def _hooks_across() -> None:
    """Hooks on saved tensors that a script enters in a pre-hook of the model and leaves in a hook."""
    zlaunch.init_distributed()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=_with_adam(3))
    contexts: list[Any] = []

    def enter(*args: Any) -> None:
        contexts.append(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        contexts[-1].__enter__()

    def leave(*args: Any) -> None:
        contexts.pop().__exit__()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    for _ in range(3):
        engine.backward(loss_of(engine, batches(1, 2)[0]))
        engine.step()


def test_hooks_that_cross_ours() -> None:
    run_workers(_hooks_across, 1)
