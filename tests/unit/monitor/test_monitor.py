"""Test the monitor with the real libraries: TensorBoard, CSV files, Weights & Biases and Comet offline."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.limits import LIMIT_S
from zlaunch.runtime.config import load
from zlaunch.runtime.errors import MonitorError
from zlaunch.runtime.observe.trackers import Event, Monitor, TensorBoard

EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", torch.tensor(1.5), 8)]


def opened(rank: int = 0, **sections: dict[str, Any]) -> Monitor:
    return Monitor(load(sections).config, rank)


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_csv(tmp_path: Path) -> None:
    config = {"enabled": True, "output_path": str(tmp_path / "out"), "job_name": "job"}
    monitor = opened(csv_monitor=config)
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    monitor.close()
    again = opened(csv_monitor=config)  # a run that goes on
    again.write_events([("Train/Samples/lr", 0.125, 24), ("val acc", 1, 24)])
    again.close()
    job = tmp_path / "out" / "job"
    assert rows(job / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        ["8", "0.5"],
        ["16", "0.25"],
        ["24", "0.125"],
    ]
    assert rows(job / "Train_Samples_train_loss.csv") == [["step", "train_loss"], ["8", "1.5"]]
    assert rows(job / "val_acc.csv") == [["step", "val acc"], ["24", "1.0"]]


def test_tensorboard(tmp_path: Path) -> None:
    monitor = opened(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    monitor.write_events(EVENTS)
    assert scalars(tmp_path / "job")["Train/Samples/train_loss"] == [(8, 1.5)]  # before it is closed
    monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    monitor.close()
    assert scalars(tmp_path / "job")["Train/Samples/lr"] == [(8, 0.5), (16, 0.25)]


WANDB = """
import json, sys, torch, wandb
from zlaunch.runtime.config import load
from zlaunch.runtime.observe.trackers import Monitor

theirs = wandb.init(project="theirs") if sys.argv[1] == "before" else None
config = load({"wandb": {"enabled": True, "project": "mine", "group": "g"}}).config
monitors = [Monitor(config, 0), Monitor(config, 0)]
theirs = wandb.init(project="theirs") if sys.argv[1] == "after" else theirs
for step in range(4):
    theirs.log({"their loss": step}, step=step)
    for monitor in monitors:
        monitor.write_events([("lr", 0.5 / (step + 1), 8 * step), ("loss", torch.tensor(1.5), 8 * step)])
        monitor.write_events([("validation", step, step)])
runs = [monitor._trackers[0]._run for monitor in monitors]
said = [[run.project, run.group, run.summary["lr"], run.summary["validation"]] for run in runs]
for monitor in monitors:
    monitor.close()
theirs.log({"their loss": 5}, step=4)
theirs.log({}, step=5)
is_open = wandb.run is theirs
print(json.dumps([said, theirs.project, theirs.step, theirs.summary["their loss"], is_open]))
theirs.finish()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_and_biases(when: str, tmp_path: Path) -> None:
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, when],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    said, project, step, last, is_open = json.loads(done.stdout.splitlines()[-1])
    assert said == [["mine", "g", 0.125, 3]] * 2
    assert (project, step, last, is_open) == ("theirs", 5, 5, True)
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 3


@pytest.mark.exhaustive
def test_comet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("COMET_API_KEY", "0" * 25)
    section = {"enabled": True, "online": False, "samples_log_interval": 10, "experiment_name": "mine"}
    monitor = opened(comet=section)
    monitor.write_events([("Train/Samples/lr", float(step), step) for step in (8, 16, 24, 32)])
    monitor.close()
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        lines = [json.loads(line) for line in file.read("messages.json").decode().splitlines()]
    metrics = [line["payload"]["metric"] for line in lines if "metric" in line["payload"]]
    logged = [(m["metricName"], float(m["metricValue"])) for m in metrics if "lr" in m["metricName"]]
    assert logged == [("Train/Samples/lr", 8.0), ("Train/Samples/lr", 24.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    monitor = opened(1, csv_monitor={"enabled": True, "output_path": str(tmp_path / "out")})
    assert monitor.enabled and not monitor.is_open
    monitor.write_events(EVENTS)
    assert not (tmp_path / "out").exists()


def test_nothing_is_opened_by_default() -> None:
    assert not opened().enabled


@pytest.mark.parametrize(
    "event",
    [
        ("lr", 1.0),
        ("lr", "much", 1),
        ("lr", torch.zeros(2), 1),
        (3, 1.0, 1),
        7,
        ("lr", 1.0, None),
        ("lr", 1.0, math.inf),
        ("lr", 10**400, 1),
        ("l\0", 1.0, 1),
    ],
)
def test_what_is_no_event_is_refused(event: Any, tmp_path: Path) -> None:
    monitor = opened(csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    with pytest.raises(MonitorError, match=r"expected an event \(name, number, step\), not"):
        monitor.write_events([event])
    monitor.close()


def test_a_missing_package_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoard, "module", "no_such_package")
    for rank in (0, 1):
        with pytest.raises(MonitorError, match=r"^tensorboard: needs the package tensorboard: pip install"):
            opened(rank, tensorboard={"enabled": True})


def test_a_folder_of_its_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(TensorBoard, "module", "no_such_package")
    with pytest.raises(MonitorError, match=r"^tensorboard: needs the package"):
        opened(tensorboard={"enabled": True})


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MonitorError, match=r"^csv_monitor: .*file"):
        opened(csv_monitor={"enabled": True, "output_path": str(tmp_path / "file")})


def test_a_tracker_that_fails_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = opened(
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
        tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "tb"},
    )
    (tmp_path / "csv").rmdir()
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 0.25, 16)])
    (tmp_path / "csv").mkdir()
    monitor.write_events([("Train/Samples/lr", 0.125, 24)])
    monitor.close()
    out = capsys.readouterr().out
    assert out.count("csv_monitor: FileNotFoundError") == 1 and "training continues" in out
    assert scalars(tmp_path / "tb")["Train/Samples/lr"] == [(8, 0.5), (16, 0.25), (24, 0.125)]
    assert rows(tmp_path / "csv" / "Train_Samples_lr.csv") == [["step", "lr"], ["24", "0.125"]]


def test_names_of_files(tmp_path: Path) -> None:
    monitor = opened(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    names = ["a/b", "a b", "a_b", "é" * 200, "../../up", "/root"]
    monitor.write_events([(name, index, 1) for index, name in enumerate(names)])
    monitor.write_events([(name, index, 2) for index, name in enumerate(names)])
    monitor.close()
    files = [rows(path) for path in (tmp_path / "job").iterdir()]
    assert {path.name for path in tmp_path.iterdir()} == {"job"}
    assert sorted(float(file[1][1]) for file in files) == [0, 1, 2, 3, 4, 5]
    assert all([row[0] for row in file] == ["step", "1", "2"] for file in files)


def test_events_after_the_end_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        monitor = opened(rank, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
        monitor.close()
        with pytest.raises(MonitorError, match="their engine was destroyed"):
            monitor.write_events(EVENTS)


def test_an_earlier_step_is_written_too(tmp_path: Path) -> None:
    monitor = opened(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "."})
    for step in (100, 50, 60):
        monitor.expect(step, False, partial(_noted, step))
    assert [row[0] for row in rows(tmp_path / "a.csv")] == ["step", "100", "50"]
    monitor.close()


class Loop:
    """A loop after a step; its optimizer has the rate that is given."""

    def __init__(self, rate: Any) -> None:
        self.global_samples = 4
        self.torch_optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        self.torch_optimizer.param_groups[0]["lr"] = rate

    def step_metrics(self) -> dict[str, float | torch.Tensor]:
        return {"grad_norm": 2.0, "train_loss": torch.tensor([1.5])}


@pytest.mark.parametrize(("rate", "written"), [(0.25, True), (torch.tensor(0.25), True), (None, False)])
def test_a_step_of_an_optimizer_with_any_rate(rate: Any, written: bool, tmp_path: Path) -> None:
    monitor = opened(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "."})
    monitor.after_step(cast(Any, Loop(rate)))
    monitor.close()
    assert rows(tmp_path / "Train_Samples_train_loss.csv")[1] == ["4", "1.5"]
    assert rows(tmp_path / "Train_Samples_grad_norm.csv")[1] == ["4", "2.0"]
    path = tmp_path / "Train_Samples_lr.csv"
    assert path.exists() == written and (not written or rows(path)[1] == ["4", "0.25"])


def _noted(step: int) -> list[Event]:
    return [("a", 0.5, step)]


def test_what_is_still_on_its_way_is_written_at_the_next_step_or_at_the_end(tmp_path: Path) -> None:
    monitor = opened(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "."})
    for step in (1, 2):
        monitor.expect(step, False, partial(_noted, step))
        lines = rows(tmp_path / "a.csv") if (tmp_path / "a.csv").exists() else []
        assert len(lines) == (0, 2)[step - 1]
    monitor.close()
    assert rows(tmp_path / "a.csv") == [["step", "a"], ["1", "0.5"], ["2", "0.5"]]
