"""Test what torch's profiler shows of a step."""

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile

import zlaunch
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import run_workers


def _names(offloaded: bool) -> set[str]:
    zlaunch.init_distributed()
    zero = {"stage3_param_persistence_threshold": 0}
    if offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}  # type: ignore[assignment]
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 6, zero=zero))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_engine(engine, batches(2, 6))
    return {event.key for event in profiler.key_averages() if event.key.startswith("zlaunch::")}


@pytest.mark.rotated
def test_gathers_reductions_and_steps_have_names() -> None:
    for names in run_workers(_names, 2, False):
        assert {"zlaunch::gather root", "zlaunch::reduce layers.0", "zlaunch::step"} <= names
    for names in run_workers(_names, 2, True):
        assert {"zlaunch::gather layers.0", "zlaunch::step layers.0"} <= names
