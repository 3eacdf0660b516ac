"""Test which values Comet gets, with a module in place of its library."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.runtime.config import load
from zlaunch.runtime.observe.trackers import CometExperiment

Logged = list[tuple[str, float, int]]


def logged(monkeypatch: pytest.MonkeyPatch, interval: int | None, *steps: int) -> Logged:
    """What is logged of a metric that has a value at each of these steps."""
    found: Logged = []
    experiment = SimpleNamespace(
        log_metric=lambda name, value, step: found.append((name, value, step)),
        set_name=lambda name: None,
    )
    started: list[dict[str, Any]] = []

    def start(**given: Any) -> Any:
        started.append(given)
        return experiment

    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=start))
    section: dict[str, Any] = {"enabled": True, "project": "p", "online": False}
    if interval is not None:
        section["samples_log_interval"] = interval
    tracker = CometExperiment(load({"comet": section}).config.comet)
    assert started[0]["project"] == "p" and started[0]["online"] is False
    for step in steps:
        tracker.write([("loss", float(step), step)])
    return found


@pytest.mark.parametrize(
    ("interval", "steps", "kept"),
    [
        (10, [8, 16, 18, 27, 28, 38], [8, 18, 28, 38]),  # exactly an interval away is far enough
        (10, [0, 9, 10, 11], [0, 10]),
        (1, [1, 2, 2, 3], [1, 2, 3]),
        (None, [1, 100, 101, 200, 201], [1, 101, 201]),
        (10, [100, 95, 90, 85, 80], [100, 90, 80]),  # a run that has gone back to a checkpoint
    ],
)
def test_values_are_an_interval_apart(
    monkeypatch: pytest.MonkeyPatch, interval: int | None, steps: list[int], kept: list[int]
) -> None:
    assert [step for _, _, step in logged(monkeypatch, interval, *steps)] == kept


def test_each_metric_has_its_own_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Logged = []
    experiment = SimpleNamespace(log_metric=lambda name, value, step: found.append((name, value, step)))
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(start=lambda **given: experiment))
    tracker = CometExperiment(load({"comet": {"enabled": True, "samples_log_interval": 10}}).config.comet)
    tracker.write([("lr", 0.5, 1), ("loss", 1.5, 5)])
    tracker.write([("lr", 0.25, 11), ("loss", 1.25, 11)])
    assert found == [("lr", 0.5, 1), ("loss", 1.5, 5), ("lr", 0.25, 11)]
