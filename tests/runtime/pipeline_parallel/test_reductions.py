"""Test when a pipeline's gradients are reduced: while the last backward pass is under way, layer by layer."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
from torch import Tensor

import zlaunch
from tests.runtime.pipeline_parallel.test_refusals import Network, config, loss_fn, micro_batches
from tests.runtime.workers import join, run_workers


def _events(stage: int) -> list[list[str]]:
    """Return, for each of three steps, in which order layers are computed backward and reduced."""
    join()
    model = Network(layers=6)
    given = config(parallel={"pipeline": 2}, zero_optimization={"stage": stage, "reduce_bucket_size": 1})
    engine: Any = zlaunch.initialize(model=model, config=given)[0]
    events: list[str] = []
    reducer = engine._reducer
    launch, rest = reducer._launch, reducer.reduce_rest

    def launched(bucket: Any) -> None:
        if any(shape.numel() for shape in bucket.unit.shapes):  # another stage has the others
            events.append(f"reduce {bucket.unit.name}")
        launch(bucket)

    def at_step() -> None:
        events.append("step")
        rest()

    reducer._launch, reducer.reduce_rest = launched, at_step

    def noted(index: int) -> Any:
        def hook(module: Any, given: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: events.append(f"backward layers.{index}"))

        return hook

    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(noted(index))
    found = []
    for _ in range(3):
        events.clear()
        engine.train_batch(iter(micro_batches(2)), loss_fn)
        found.append(list(events))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [0, 1])
def test_each_layer_is_reduced_while_the_layers_before_it_are_computed(stage: int) -> None:
    stages = (
        ["layers.2", "layers.1", "layers.0", "words"],
        ["head", "norm", "layers.5", "layers.4", "layers.3"],
    )
    for rank, (first, *later) in enumerate(run_workers(_events, 4, stage)):
        own = [f"reduce {name}" for name in stages[rank // 2]]
        assert first[-len(own) - 1 :] == ["step", *own], "in the first step, the order is not agreed on yet"
        for events in later:
            assert [event for event in events if event.startswith("reduce")] == own and events[-1] == "step"
            for name in stages[rank // 2]:
                if name.startswith("layers"):
                    number = int(name.rpartition(".")[2])
                    at = events.index(f"reduce {name}")
                    assert f"backward layers.{number}" in events[:at]
                    # not before this layer's reduction has begun, in the last micro-batch
                    before = f"backward layers.{number - 1}"
                    assert rank // 2 or not number or before in events[at:], events


def _frozen_stage() -> str:
    """Return what a pipeline prints whose first stage has nothing to train."""
    join()
    model = Network(layers=2)
    model.words.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    engine: Any = zlaunch.initialize(model=model, config=config())[0]
    with redirect_stdout(io.StringIO()) as printed:
        for _ in range(2):
            engine.train_batch(iter(micro_batches(2)), loss_fn)
    return printed.getvalue()


def test_a_stage_without_gradients_has_not_dropped_any() -> None:
    assert not any("zero_grad" in said for said in run_workers(_frozen_stage, 2))


def _calls(interval: int) -> int:
    """Return how often a layer of this rank is computed in a step of two micro-batches."""
    join()
    model = Network(layers=4)
    given = config(parallel={"pipeline": 2}, pipeline={"activation_checkpoint_interval": interval})
    engine: Any = zlaunch.initialize(model=model, config=given)[0]
    calls = 0

    def count(module: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1

    for layer in model.layers[1:3]:
        next(layer.children()).register_forward_pre_hook(count)
    engine.train_batch(iter(micro_batches(2)), loss_fn)
    before = calls  # the first step has found out the shapes
    engine.train_batch(iter(micro_batches(2)), loss_fn)
    return calls - before


def _without_stages() -> str:
    join()
    given = config(parallel={"pipeline": 1}, pipeline={"activation_checkpoint_interval": 1})
    with redirect_stdout(io.StringIO()) as out:
        zlaunch.initialize(model=Network(layers=2), config=given)
    return out.getvalue()


def test_an_interval_without_stages_is_a_warning() -> None:
    (said,) = run_workers(_without_stages, 1)
    assert "activation_checkpoint_interval has no effect without pipeline stages" in said


def test_an_interval_recomputes_each_layer() -> None:
    assert run_workers(_calls, 2, 0) == [2, 2]
    assert run_workers(_calls, 2, 1) == [4, 4]
