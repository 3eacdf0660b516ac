"""Test how much memory gradients take, counted from the live objects, and what the estimate says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.backward_step.test_equality import SAMPLES, settings
from tests.runtime.models import batches, net, train_engine
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.memory.estimate import Setting, plan
from zlaunch.runtime.offload.manager import OffloadOptions

DEPTH = 8


def _gradient_bytes(engine: Any) -> int:
    """Counts the bytes of gradients and of the buffers that they are sent from, now."""
    reducer = engine._reducer
    shards = [unit.store.grad_memory for unit in engine.units]
    lent = [bucket.tensor for bucket in reducer._buckets.values()]
    lent += [reduction.lent for reduction in reducer._in_flight]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in lent if t is not None}
    found |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reducer._pool.free}
    return sum(found.values()) + sum(shard.nbytes for shard in shards if shard is not None)


def _measure(stage: int) -> dict[str, Any]:
    join()
    found: dict[str, Any] = {}
    for stepping in (False, True):
        torch.manual_seed(1)
        options = settings(stage, step_in_backward=stepping)
        engine, *_ = zlaunch.initialize(model=net(depth=DEPTH).double(), config=options)
        seen: list[int] = []
        take = engine._reducer.consumer.take

        def look(bucket: Any, take: Any = take, seen: Any = seen, engine: Any = engine) -> None:
            seen.append(_gradient_bytes(engine))
            take(bucket)

        setattr(engine._reducer.consumer, "take", look)  # noqa: B010  # a method
        train_engine(engine, batches(4, SAMPLES))
        found[f"peak {stepping}"] = max(seen)
        found[f"state {stepping}"] = {k: v.clone() for k, v in engine.module.state_dict().items()}
        units = [unit for unit in engine.units if unit.trainable]
        found["units"] = sorted((unit.numel, unit.stop - unit.start) for unit in units)
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "world"), [(2, 1), (3, 1), (3, 2)])
def test_a_rank_has_gradients_of_few_units(stage: int, world: int) -> None:
    for found in run_workers(_measure, world, stage):
        whole = sum(shard for _, shard in found["units"]) * 8
        few = sum(numel for numel, _ in found["units"][-3:]) * 8
        few += 2 * max(shard for _, shard in found["units"]) * 8
        assert found["peak True"] <= few < found["peak False"]
        assert found["peak False"] - found["peak True"] >= whole - few
        for name, value in found["state False"].items():
            torch.testing.assert_close(found["state True"][name], value, rtol=1e-12, atol=1e-14)


def test_the_estimate_counts_the_units_in_flight() -> None:
    blocks = [1000, *[500] * 10]
    setting = Setting(stage=3, world_size=2, blocks=blocks, dtype_bytes=2, states=2, offload=OffloadOptions())
    assert plan(setting).gradients.device == 2 * (1000 + 500 + 500) + 4 * 3000
    stepping = replace(setting, steps_in_backward=True)
    assert plan(stepping).gradients.device == 2 * (1000 + 500 + 500) + 4 * (500 + 250)
    assert plan(stepping).optimizer == plan(setting).optimizer
