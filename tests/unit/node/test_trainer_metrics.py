"""Test what a Hugging Face Trainer's logs become in a run, with a package in transformers' place."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.compat import trainer_metrics
from zlaunch.runtime import report
from zlaunch.view.progress import RunProgress

TRAINER = """
from transformers.trainer_callback import TrainerCallback

class Flow(TrainerCallback):
    pass

DEFAULT_CALLBACKS = [Flow]
"""
LOGS = (
    (5, {"loss": 2.0, "grad_norm": 1.5, "learning_rate": 1e-4, "epoch": 0.1}),
    (10, {"eval_loss": 3.0, "eval_accuracy": 0.5, "eval_runtime": 9.0, "eval_samples_per_second": 8.0}),
    (20, {"eval_loss": 2.5, "rewards/mean": 1, "note": "text"}),
    (20, {"step": 77, "steps": 5}),
    (20, {"train_loss": 2.2, "total_flos": 1e9, "train_runtime": 3.0}),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that trains, and what the launcher knows afterwards."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "trainer.py").write_text(TRAINER)
    (tmp_path / "transformers" / "trainer_callback.py").write_text("class TrainerCallback:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "zlaunch.compat.trainer_callback", raising=False)
    monkeypatch.setattr(report, "reported", report.Reported())
    read_end, write_end = os.pipe()
    monkeypatch.setenv("ZLAUNCH_EVENT_FD", str(write_end))
    monkeypatch.setenv("RANK", "0")

    def train(*, engine: bool, late: bool = False) -> tuple[RunProgress, list[dict[str, Any]]]:
        if late:
            importlib.import_module("transformers.trainer")
        trainer_metrics.watch()
        module = importlib.import_module("transformers.trainer")
        report.reported.has_engine = engine
        callback = pickle.loads(pickle.dumps(module.DEFAULT_CALLBACKS[1]()))  # as a Trainer has it
        state = SimpleNamespace(max_steps=20, global_step=0)
        callback.on_train_begin(None, state, None)
        for step, logs in LOGS:
            state.global_step = step
            callback.on_log(None, state, None, logs=logs, model=None)
        events = [json.loads(line) for line in os.read(read_end, 1 << 16).splitlines()]
        return RunProgress().take_all(events), events

    yield train
    os.close(read_end)
    os.close(write_end)
    sys.modules.pop("zlaunch.compat.trainer_callback", None)  # it has the other package's class
    for name in _imported():  # later tests of this process import the real package
        del sys.modules[name]


def _imported() -> list[str]:
    """List what is imported of transformers."""
    return [name for name in sys.modules if name.partition(".")[0] == "transformers"]


@pytest.mark.parametrize("late", [False, True])
def test_total_steps_and_evaluations_beside_an_engine(run: Any, late: bool) -> None:
    progress, events = run(engine=True, late=late)
    assert (progress.step, progress.steps) == (20, 20)
    assert progress.series["eval_loss"].shown() == [(10, 3.0), (20, 2.5)]
    assert set(progress.series) == {"eval_loss", "eval_accuracy", "rewards/mean"}, "the engine has the others"
    assert not any(event["printed"] for event in events), "the Trainer prints them"


def test_without_an_engine_the_loss_is_the_trainers(run: Any) -> None:
    progress, _ = run(engine=False)
    assert progress.series["loss"].shown() == [(5, 2.0)]
    assert progress.series["lr"].shown() == [(5, 1e-4)] and "grad_norm" in progress.series
    assert report.reported.steps == 20
