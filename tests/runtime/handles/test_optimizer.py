"""Test the optimizer that a script holds: every method leads to the engine or says why not."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error
from tests.runtime.workers import join, run_workers
from zlaunch.optim import Lamb
from zlaunch.runtime.script.optimizer import ZeroOptimizer

TOLERANCE = 1e-9
STAGES = (0, 1, 2, 3)


def options(stage: int, **extra: Any) -> dict[str, Any]:
    """A config with the smallest blocks sharded and no optimizer section."""
    given = config(stage, 2, zero={"stage3_module_granularity_threshold": 0}, **extra)
    return {key: value for key, value in given.items() if key != "optimizer"}


def worst(model: nn.Module, plain: nn.Module) -> float:
    """The largest relative difference of the parameters of two models."""
    state, wanted = model.state_dict(), plain.state_dict()
    return max(relative_error(state[name], wanted[name]) for name in wanted)


def _adam(model: nn.Module, **extra: Any) -> torch.optim.Optimizer:
    parameters = extra.pop("parameters", None)
    return torch.optim.AdamW(
        list(model.parameters()) if parameters is None else parameters, lr=3e-3, weight_decay=0.1, **extra
    )


# -- zero_grad: the ordinary GAN loop, in which the discriminator collects gradients that it must not use


def _gan(way: str) -> dict[int, float]:
    rank = join()
    found = {}
    for stage in STAGES:
        plain, model = net().double(), net().double()
        theirs, mine = _adam(plain), _adam(model)
        engine, returned, *_ = zlaunch.initialize(model=model, optimizer=mine, config=options(stage))
        assert returned is mine and engine.optimizer is mine
        assert isinstance(mine, torch.optim.AdamW) and isinstance(mine, ZeroOptimizer)
        assert mine.param_groups[0]["params"][0] is model.embedding.weight
        for first, second in zip(batches(5, 4), batches(5, 4)[::-1], strict=True):
            (3 * loss_of(plain, first)).backward()  # to be dropped
            theirs.zero_grad()
            loss_of(plain, second).backward()
            theirs.step()
            theirs.zero_grad()

            (3 * loss_of(engine, first.chunk(2)[rank])).backward()
            {"optimizer": mine.zero_grad, "model": model.zero_grad, "engine": engine.zero_grad}[way]()
            loss_of(engine, second.chunk(2)[rank]).backward()
            mine.step()
            mine.zero_grad()
        found[stage] = worst(model, plain)
        engine.destroy()
        assert type(mine) is torch.optim.AdamW
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["optimizer", "model", "engine"])
def test_zero_grad_drops_gradients(way: str) -> None:
    for found in run_workers(_gan, 2, way):
        assert {stage: error for stage, error in found.items() if not error <= TOLERANCE} == {}


def _part() -> dict[int, float]:
    """Drop the gradients of a submodule, and of one parameter, alone."""
    rank = join()
    found = {}
    for stage in STAGES:
        plain, model = net().double(), net().double()
        theirs = _adam(plain)
        engine, *_ = zlaunch.initialize(model=model, optimizer=_adam(model), config=options(stage))
        for batch in batches(4, 4):
            loss_of(plain, batch).backward()
            plain.layers[1].zero_grad()
            plain.layers[0].up.weight.grad = None
            theirs.step()
            theirs.zero_grad()

            engine.backward(loss_of(engine, batch.chunk(2)[rank]))
            model.layers[1].zero_grad()
            model.layers[0].up.weight.grad = None
            engine.step()
        found[stage] = worst(model, plain)
        engine.destroy()
    return found


def test_zero_grad_of_a_part() -> None:
    for found in run_workers(_part, 2):
        assert {stage: error for stage, error in found.items() if not error <= TOLERANCE} == {}


# -- unfreezing


def _unfreeze(way: str) -> dict[int, float]:
    """A block that is frozen at the start is trained from the third step on, another from the fifth."""
    rank = join()
    found = {}
    for stage in STAGES:
        plain, model = net().double(), net().double()
        for each in (plain, model):
            each.layers[0].requires_grad_(False)
            each.layers[1].requires_grad_(False)
        given = [
            [p for p in each.parameters() if p.requires_grad or way == "requires_grad"]
            for each in (plain, model)
        ]
        theirs, mine = _adam(plain, parameters=given[0]), _adam(model, parameters=given[1])
        engine, *_ = zlaunch.initialize(model=model, optimizer=mine, config=options(stage, clip=0.5))
        for step, batch in enumerate(batches(8, 4)):
            if step in (2, 4):
                for each, optimizer in ((plain, theirs), (model, mine)):
                    layer = each.layers[step // 2 - 1].requires_grad_(True)
                    if way == "add_param_group":
                        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
            if step == 6:
                for each in (plain, model):
                    each.layers[0].requires_grad_(False)
            loss_of(plain, batch).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            engine.backward(loss_of(engine, batch.chunk(2)[rank]))
            engine.step()
        found[stage] = worst(model, plain)
        assert len(mine.param_groups) == (3 if way == "add_param_group" else 1)
        engine.destroy()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["requires_grad", "add_param_group"])
def test_what_is_unfrozen_is_trained(way: str) -> None:
    for found in run_workers(_unfreeze, 2, way):
        assert {stage: error for stage, error in found.items() if not error <= TOLERANCE} == {}


def _unfreeze_offloaded(folder: str) -> dict[str, float]:
    zlaunch.init_distributed()
    found = {}
    for device in ("cpu", "nvme"):
        plain, model = net().double(), net().double()
        for each in (plain, model):
            each.layers[0].requires_grad_(False)
        theirs, mine = _adam(plain), _adam(model)
        place = {"device": device, "nvme_path": folder}
        given = options(2)
        given["zero_optimization"]["offload_optimizer"] = place
        engine, *_ = zlaunch.initialize(model=model, optimizer=mine, config=given)
        for step, batch in enumerate(batches(5, 2)):
            if step == 2:
                plain.layers[0].requires_grad_(True)
                model.layers[0].requires_grad_(True)
            loss_of(plain, batch).backward()
            theirs.step()
            theirs.zero_grad()
            engine.backward(loss_of(engine, batch))
            engine.step()
        found[device] = worst(model, plain)
        engine.destroy()
    return found


def test_what_is_unfrozen_is_trained_offloaded(tmp_path: Path) -> None:
    (found,) = run_workers(_unfreeze_offloaded, 1, str(tmp_path))
    assert {device: error for device, error in found.items() if not error <= TOLERANCE} == {}


def _unknown() -> None:
    zlaunch.init_distributed()
    model = net()
    model.layers[0].requires_grad_(False)
    mine = _adam(model, parameters=[p for p in model.parameters() if p.requires_grad])
    engine, *_ = zlaunch.initialize(model=model, optimizer=mine, config=options(2))
    with pytest.raises(zlaunch.OptimizerError, match="not a parameter of this engine"):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        mine.add_param_group({"params": [model.head.weight]})
    model.layers[0].requires_grad_(True)
    with pytest.raises(zlaunch.ParameterError, match=r"layers\.0.* was frozen .*add_param_group"):
        loss_of(engine, batches(1, 2)[0])
    mine.add_param_group({"params": list(model.layers[0].parameters())})
    loss_of(engine, batches(1, 2)[0])
    mine.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    engine.backward(loss_of(engine, batches(1, 2)[0]))
    with pytest.raises(zlaunch.ParameterError, match=r"param group 0 .*add_param_group"):
        engine.step()


def test_a_group_of_unknown_parameters_is_refused() -> None:
    run_workers(_unknown, 1)


# -- everything else


def _methods(stage: int) -> list[str]:
    rank = join()
    model = net()
    mine = _adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(mine, 1, 0.5)  # wraps step() of the plain optimizer
    engine, *_ = zlaunch.initialize(model=model, optimizer=mine, lr_scheduler=schedule, config=options(stage))
    calls: list[str] = []
    mine.register_step_pre_hook(lambda optimizer, args, kw: calls.append(f"before {optimizer is mine}"))
    mine.register_step_post_hook(lambda optimizer, args, kw: calls.append(f"after {optimizer is mine}"))
    data = [batch.chunk(2)[rank] for batch in batches(3, 4)]
    engine.backward(loss_of(engine, data[0]))
    engine.step()
    assert calls == ["before True", "after True"] and mine.param_groups[0]["lr"] == 1.5e-3
    with pytest.raises(RuntimeError, match="without a backward pass"):
        mine.step()
    with pytest.raises(zlaunch.OptimizerError, match="closure"):
        mine.step(lambda: 0.0)
    with pytest.raises(zlaunch.OptimizerError, match="safe_get_full_optimizer_state"):
        mine.state[model.head.weight]
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(zlaunch.OptimizerError, match="save_checkpoint"):
            copying(mine)
    assert "AdamW" in repr(mine)

    saved = copy.deepcopy(mine.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    engine.backward(loss_of(engine, data[1]))
    engine.step()
    once = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    mine.load_state_dict(saved)
    assert mine.param_groups[0]["lr"] == 1.5e-3
    engine.backward(loss_of(engine, data[1]))
    engine.step()
    assert all(torch.equal(value, once[name]) for name, value in model.state_dict().items())
    with pytest.raises(zlaunch.OptimizerError, match="a different rank"):
        mine.load_state_dict({**saved, "zlaunch": {**saved["zlaunch"], "rank": 1 - rank}})
    with pytest.raises(zlaunch.OptimizerError, match="not from an engine"):
        mine.load_state_dict(_adam(net()).state_dict())
    with pytest.raises(zlaunch.OptimizerError, match="another engine"):
        zlaunch.initialize(model=net(), optimizer=mine, config=options(stage))
    return calls


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_method_works_or_says_why_not(stage: int) -> None:
    run_workers(_methods, 2, stage)


def _hooked(kind: str, stage: int) -> float:
    """A hook before the step that sets its rate: the largest difference of two weights from torch's."""
    join()
    found = []
    for with_engine in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 6).double()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=5.0)
        count = iter(range(1, 9))

        def set_rate(given: torch.optim.Optimizer, args: Any, kwargs: Any, count: Any = count) -> None:
            given.param_groups[0]["lr"] = 0.01 * next(count)

        engine: Any = None
        if with_engine:
            engine = zlaunch.initialize(model=model, optimizer=optimizer, config=options(stage))[0]
        (engine.optimizer if with_engine else optimizer).register_step_pre_hook(set_rate)
        for number in range(4):
            optimizer.zero_grad()
            x = torch.full((1, 6), 1.0 + number, dtype=torch.float64)
            if with_engine:
                engine.backward(engine(x).square().mean())
                engine.step()
            else:
                model(x).square().mean().backward()
                optimizer.step()
        weight = zlaunch.safe_get_full_fp32_param(model.weight) if with_engine else model.weight.detach()
        assert weight is not None
        found.append(weight.clone())
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_what_a_hook_before_the_step_sets_counts_in_it(kind: str) -> None:
    for stage in (0, 3):
        assert max(run_workers(_hooked, 1, kind, stage)) < 1e-12


def _checked_groups(folder: str) -> None:
    join()
    on_disk = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    for make, group, zero, said in (
        (Lamb, {"state_dtype": "int8"}, {"stage": 2}, "not supported with Lamb"),
        (torch.optim.AdamW, {"state_dtype": "bf16"}, on_disk, "state on NVMe is fp32"),
        (torch.optim.AdamW, {"state_dtype": "fp8"}, {"stage": 2}, "'fp8', expected one of"),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model[1].requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        optimizer = make(model[0].parameters())
        engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=config)[0]
        model[1].requires_grad_(True)
        further = list(model[1].parameters())
        with pytest.raises(zlaunch.OptimizerError, match=said):
            engine.optimizer.add_param_group({"params": further, **group})
        engine.optimizer.add_param_group({"params": further})  # nothing was left of the refused one
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        engine.destroy()


def test_groups_are_checked_as_those_at_the_start(tmp_path: Path) -> None:
    run_workers(_checked_groups, 1, str(tmp_path))


def _raising(when: str, stage: int) -> tuple[list[float], list[float]]:
    """A hook that raises in the second step, which the script catches: its gradients are dropped."""
    join()
    found: list[list[float]] = []
    for with_engine in (False, True):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine: Any = None
        if with_engine:
            engine = zlaunch.initialize(model=model, optimizer=optimizer, config=options(stage))[0]
        count = iter(range(9))

        def stop(given: Any, args: Any, kwargs: Any, count: Any = count) -> None:
            if next(count) == 1:
                raise KeyError("mine")

        handle = engine.optimizer if with_engine else optimizer
        (handle.register_step_pre_hook if when == "before" else handle.register_step_post_hook)(stop)
        values = []
        for number in range(4):
            x = torch.full((1, 1), 10.0**number, dtype=torch.float64)
            try:
                if with_engine:
                    engine.backward(engine(x).sum())
                    engine.step()
                else:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
            except KeyError:
                assert number == 1
            weight = zlaunch.safe_get_full_fp32_param(model.weight) if with_engine else model.weight.detach()
            assert weight is not None
            values.append(float(weight.reshape(-1)[0]))
        found.append(values)
    return found[0], found[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_raises_leaves_no_gradient_behind(when: str) -> None:
    for stage in (0, 3):
        for wanted, mine in run_workers(_raising, 1, when, stage):
            assert mine == pytest.approx(wanted)
