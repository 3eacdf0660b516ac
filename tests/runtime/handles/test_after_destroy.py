"""Test what a script's optimizer does after ``engine.destroy()``: it continues with its state, or raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import contains
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.handles.test_optimizer import TOLERANCE, options, worst
from tests.runtime.models import batches, loss_of, net
from tests.runtime.workers import join, run_workers

GROUPS = ((torch.optim.AdamW, {"lr": 3e-3}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))


def _optimizer(model: Any, kind: Any, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, so that its state is in several pieces."""
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not own for own in head)]
    optimizer: torch.optim.Optimizer = kind([{"params": rest}, {"params": head, "lr": 1e-3}], **arguments)
    return optimizer


def _continued(stages: tuple[int, ...]) -> dict[str, float]:
    """Two steps of an engine, then two of plain torch with the same optimizer, beside plain torch alone."""
    rank = join()
    world = torch.distributed.get_world_size()
    found = {}
    for stage in stages:
        for kind, arguments in GROUPS:
            plain, model = net().double(), net().double()
            theirs, mine = _optimizer(plain, kind, arguments), _optimizer(model, kind, arguments)
            engine: Any = zlaunch.initialize(model=model, optimizer=mine, config=options(stage))[0]
            for step, batch in enumerate(batches(4, 4)):
                loss_of(plain, batch).backward()
                theirs.step()
                theirs.zero_grad()
                if step == 2:
                    engine.destroy()
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        own, wanted = mine.state[p], theirs.state[q]
                        assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in wanted.items()}
                if step < 2:
                    engine.backward(loss_of(engine, batch.chunk(world)[rank]))
                    engine.step()
                else:
                    loss_of(model, batch).backward()
                    mine.step()
                    mine.zero_grad()
            found[f"{kind.__name__} {stage}"] = worst(model, plain)
    return found


def test_state_that_is_whole_on_a_rank_goes_back_to_the_optimizer() -> None:
    for world, stages in ((1, (0, 1, 3)), (2, (0,))):
        for found in run_workers(_continued, world, stages):
            assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def _lost(stages: tuple[int, ...]) -> None:
    """Whatever would restart without the state raises, on each rank."""
    rank = join()
    for stage in stages:
        model = net().double()
        mine = _optimizer(model, *GROUPS[0])
        given: dict[str, Any] = {"model": model, "optimizer": mine, "config": options(stage)}
        engine: Any = zlaunch.initialize(**given)[0]
        engine.destroy()
        engine = zlaunch.initialize(**given)[0]  # the optimizer had no state yet
        engine.backward(loss_of(engine, batches(1, 4)[0].chunk(2)[rank]))
        engine.step()
        engine.destroy()
        before = copy.deepcopy(model.state_dict())
        loss_of(model, batches(1, 4)[0]).backward()
        uses: tuple[Callable[[], object], ...] = (
            *(mine.step, mine.state_dict, partial(copy.deepcopy, mine)),
            partial(list, mine.state),
            partial(len, mine.state),
            partial(contains, mine.state, model.head.weight),
            partial(zlaunch.initialize, **given),
        )
        for use in uses:
            with pytest.raises(zlaunch.OptimizerError, match=r"engine\.destroy\(\).*new optimizer"):
                use()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        fresh = _optimizer(net().double(), *GROUPS[0])
        mine.load_state_dict(fresh.state_dict())  # a state that the script has chosen
        mine.step()
        assert len(mine.state) == len(list(model.parameters()))


def test_an_optimizer_without_its_state_refuses_to_continue() -> None:
    run_workers(_lost, 2, (1, 3))
