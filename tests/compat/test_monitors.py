"""Test DeepSpeed's ways to trackers: the engine's monitor, and a MonitorMaster without an engine."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.compat.test_engine import _deepspeed
from tests.runtime.workers import run_workers


def test_a_monitor_without_an_engine(deepspeed: Any, tmp_path: Path) -> None:
    from deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
    from deepspeed.monitor.monitor import Monitor, MonitorMaster

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = get_monitor_config({"train_batch_size": 1, "csv_monitor": section})
    assert isinstance(config, DeepSpeedMonitorConfig) and config.enabled and not config.wandb.enabled
    master = MonitorMaster(config)
    assert master.enabled and isinstance(master, Monitor)
    master.write_events([("Train/loss", 0.5, 3)])
    with (tmp_path / "job" / "Train_loss.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["3", "0.5"]]
    assert not get_monitor_config({}).enabled
    whole = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": section})
    assert whole.monitor_config.enabled and whole.monitor_config.csv_monitor.job_name == "job"
    with pytest.raises(Exception, match=r"csv_monitor\.path"):
        get_monitor_config({"csv_monitor": {"path": "x"}})


def _train(folder: str) -> None:
    deepspeed = _deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
    }
    model = nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Val/loss", 2.0, engine.global_samples)])
    engine.destroy()


def test_the_engines_monitor(tmp_path: Path) -> None:
    run_workers(_train, 2, str(tmp_path))
    with (tmp_path / "job" / "Val_loss.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["0", "2.0"]]
