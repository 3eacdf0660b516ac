"""Test where the number of a run's steps is found."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

from zlaunch.runtime import report
from zlaunch.runtime.config import load
from zlaunch.runtime.data import EngineLoader
from zlaunch.runtime.observe.reporter import find_total_steps


class Stream(IterableDataset[int]):
    """Samples without a number."""

    def __iter__(self) -> Any:
        return iter(range(8))


def found(
    *, scheduler: Any = None, loader: Any = None, steps: int = 0, micro_batches: int = 1, **config: Any
) -> dict[str, int]:
    """The number for a loop."""
    loop: Any = SimpleNamespace(
        training_dataloader=loader,
        lr_scheduler=scheduler,
        global_steps=steps,
        accumulated=0,
        gradient_accumulation_steps=lambda: micro_batches,
    )
    return find_total_steps(load({"train_batch_size": 1, **config}).config, loop)


def optimizer() -> torch.optim.Optimizer:
    """An optimizer."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def _linear(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


def test_schedules_say_how_many_steps_there_are() -> None:
    params = {"total_num_steps": 70, "warmup_max_lr": 0.1}
    assert found(scheduler={"type": "WarmupDecayLR", "params": params}) == {}, "an object of the script"
    section = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    assert find_total_steps(load({"train_batch_size": 1, **section}).config, _loop()) == {"steps": 70}
    trainers = lr_scheduler.LambdaLR(optimizer(), partial(_linear, num_training_steps=500))
    assert found(scheduler=trainers) == {"steps": 500}
    assert found(scheduler=lr_scheduler.LambdaLR(optimizer(), lambda step: 1.0)) == {}
    assert found(scheduler=lr_scheduler.OneCycleLR(optimizer(), 0.1, total_steps=60)) == {"steps": 60}
    assert found(scheduler=SimpleNamespace(total_steps=float("inf"))) == {}
    assert found() == {}


def _loop() -> Any:
    return SimpleNamespace(
        training_dataloader=None, lr_scheduler=None, global_steps=0, gradient_accumulation_steps=lambda: 1
    )


def test_a_loader_tells_the_steps_until_the_end_of_the_epoch() -> None:
    loader = EngineLoader(list(range(40)), batch_size=2, rank=0, world_size=2)  # type: ignore[arg-type]
    assert found(loader=loader) == {}, "the script may never read it"
    step = 0
    for epoch in (1, 2):
        for _ in loader:
            step += 1
            assert found(loader=loader, steps=step) == {"steps": 10 * epoch, "of_epoch": epoch}
        assert found(loader=loader, steps=step) == {}, "what comes is not from this loader"
    next(iter(loader))
    assert found(loader=loader, micro_batches=3, steps=7) == {"steps": 10, "of_epoch": 3}, "9 of 3 each"
    assert found(loader=loader, scheduler=SimpleNamespace(total_steps=15)) == {"steps": 15}
    stream = EngineLoader(Stream(), batch_size=2, rank=0, world_size=1)
    next(iter(stream))
    assert found(loader=stream) == {}


def test_earlier_epochs_on_another_number_of_ranks_count_as_they_were_trained() -> None:
    data: Any = list(range(40))
    before = EngineLoader(data, batch_size=2, rank=0, world_size=2)
    list(before)
    after = EngineLoader(data, batch_size=2, rank=0, world_size=1)
    after.load_state_dict(before.state_dict())
    for taken, _ in enumerate(after, 1):
        assert found(loader=after, steps=10 + taken) == {"steps": 30, "of_epoch": 2}
    assert taken == 20


def test_the_scripts_own_number_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = report.Reported()
    monkeypatch.setattr(report, "reported", notes)
    report.report(loss=1.0)
    assert notes.steps is None
    report.report(steps=100)
    report.report(loss=1.0)
    assert notes.steps == 100
