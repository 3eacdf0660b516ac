"""Test that a step is made of as many micro-batches as the batch sizes say, after they change as well."""

from __future__ import annotations

from typing import Any

import pytest

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine, train_plain
from tests.runtime.pipeline_parallel import test_refusals as pipeline
from tests.runtime.workers import join, run_workers

COUNTS = (2, 3, 1, 4)
"""Micro-batches of each step. After the first, the count of all micro-batches modulo 3 is out of step."""


def _train_with_changes(stage: int) -> list[Any]:
    """Return the errors of the parameters beside plain torch, and the counters."""
    join()
    plain = net().double()
    engine, *_ = zlaunch.initialize(model=net().double(), config=config(stage, 3, COUNTS[0]))
    data = [batches(1, 6 * count)[0] for count in COUNTS]
    for count, batch in zip(COUNTS, data, strict=True):
        engine.set_batch(6 * count, 3, count)
        train_engine(engine, [batch])
    train_plain(plain, data)
    wanted = plain.state_dict()
    worst = max(relative_error(value, wanted[name]) for name, value in engine.module.state_dict().items())
    engine.set_batch(12, 3, 2)
    engine.backward(loss_of(engine, data[0][:3]))
    with pytest.raises(RuntimeError, match="cannot change from 2 to 3 after 1 of its micro-batches"):
        engine.set_batch(18, 3, 3)  # before the step() that counts the pass
    engine.step()
    with pytest.raises(RuntimeError, match="cannot change from 2 to 3 after 1 of its micro-batches"):
        engine.set_batch(18, 3, 3)
    engine.backward(loss_of(engine, data[0][:3]))
    engine.step_observers.append(_raise)
    with pytest.raises(OSError, match="of an observer"):
        engine.step()
    return [worst, engine.global_steps, engine.micro_steps, engine.is_gradient_accumulation_boundary()]


def _raise(engine: Any) -> None:
    raise OSError("of an observer")


@pytest.mark.parametrize("stage", [0, 3])
def test_training_equals_plain_torch(stage: int) -> None:
    for worst, steps, micro_steps, boundary in run_workers(_train_with_changes, 2, stage):
        assert worst < 1e-9
        assert (steps, micro_steps) == (len(COUNTS) + 1, sum(COUNTS) + 1)
        assert not boundary, "the step was made before the observer raised: the next one begins"


def _steps_of_a_pipeline() -> list[int]:
    join()
    engine = pipeline.start(pipeline.Network())
    steps = []
    for count in COUNTS:
        engine.set_batch(2 * count, 2, count)
        engine.train_batch(iter(pipeline.micro_batches(count)), pipeline.loss_fn)
        steps.append(engine.global_steps)
    return steps


def test_each_batch_of_a_pipeline_is_a_step() -> None:
    assert run_workers(_steps_of_a_pipeline, 2) == [[1, 2, 3, 4]] * 2
