"""Test that all parts of an engine follow parameters that are unfrozen and param groups that are added."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.handles.test_optimizer import options
from tests.runtime.models import batches, loss_of, net
from tests.runtime.workers import join, run_workers


def _former_units() -> dict[int, list[str]]:
    """Return by stage the units that are still in memory after their parameters were unfrozen."""
    rank = join()
    found = {}
    for stage in (0, 2, 3):
        model = net()
        model.layers[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=options(stage))[0]
        former = [weakref.ref(unit) for unit in engine.units if not unit.trainable]
        for _ in range(2):
            engine.backward(loss_of(engine, batches(1, 4)[0].chunk(2)[rank]))
            engine.step()
            model.requires_grad_(True)
        gc.collect()
        assert former
        found[stage] = [str(unit.name) for ref in former if (unit := ref()) is not None]
        engine.destroy()
    return found


def test_the_units_of_frozen_parameters_end_when_they_are_unfrozen() -> None:
    for found in run_workers(_former_units, 2):
        assert found == {0: [], 2: [], 3: []}


def _scheduled(folder: str) -> tuple[list[list[float]], list[float]]:
    """Return the rates of a run that adds a param group, and that of the next step after its resume."""
    join()

    def start() -> Any:
        model = net()
        model.layers[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        given = options(2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}})
        engine = zlaunch.initialize(model=model, optimizer=optimizer, config=given)[0]
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 1e-4})
        return engine

    def step(engine: Any) -> list[float]:
        engine.backward(loss_of(engine, batches(1, 2)[0]))
        engine.step()
        return [float(rate) for rate in engine.get_lr()]

    engine = start()
    rates = [step(engine) for _ in range(3)]
    engine.save_checkpoint(folder)
    rates.append(step(engine))
    engine.destroy()
    engine = start()
    engine.load_checkpoint(folder)
    return rates, step(engine)


def test_a_schedule_follows_a_group_added_later(tmp_path: Path) -> None:
    ((rates, resumed),) = run_workers(_scheduled, 1, str(tmp_path))
    assert all(later == pytest.approx(first / 10) for first, later in rates)
    assert resumed == rates[-1]


def _never_trained() -> None:
    join()
    for optimizer_has_it in (False, True):
        model = net()
        model.odd = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        parameters = [p for p in model.parameters() if optimizer_has_it or p is not model.odd]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        engine: Any = zlaunch.initialize(model=model, optimizer=optimizer, config=options(2))[0]
        batch = batches(1, 2)[0]
        engine.backward(loss_of(engine, batch))
        engine.step()
        engine.backward(loss_of(engine, batch))
        model.odd.requires_grad_(True)
        with pytest.raises(zlaunch.ParameterError, match="odd is complex64 and requires grad"):
            engine.step()
        with pytest.raises(zlaunch.ParameterError, match="odd is complex64 and requires grad"):
            engine(batch)
        model.odd.requires_grad_(False)
        engine.zero_grad()
        engine.backward(loss_of(engine, batch))
        engine.step()
        engine.destroy()


def test_an_odd_parameter_that_is_unfrozen_is_refused_as_at_the_start() -> None:
    run_workers(_never_trained, 1)
