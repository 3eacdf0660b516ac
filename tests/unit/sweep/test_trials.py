"""Test what becomes of a trial's values, and how trials are compared."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.sweep.space import SweepSpace
from zlaunch.sweep.trials import as_arguments, hold, open_trials, ranked, with_values, write_results


def test_values_go_into_the_config_or_the_command_line() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1}}, "x": 3}
    changed = with_values(config, {"optimizer.params.lr": 2, "bf16.enabled": True})
    assert changed == {
        "optimizer": {"type": "AdamW", "params": {"lr": 2}},
        "x": 3,
        "bf16": {"enabled": True},
    }
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 1}}
    with pytest.raises(LaunchError, match="x is 3 in the config"):
        with_values(config, {"x.y": 1})
    assert as_arguments({"--a": 1e-4, "--b": True, "--c": False, "--d": None, "--e": "x y"}) == [
        "--a=0.0001",
        "--b",
        "--e=x y",
    ]


def standing(folder: Path) -> str:
    """A trial is new until it has a record."""
    return "ended 3" if (folder / "launcher.json").exists() else "new"


def report(folder: Path, *values: dict[str, object], rank: int = 0) -> None:
    with open(folder / "events.jsonl", "a") as file:
        for each in values:
            file.write(json.dumps({"type": "metrics", "rank": rank, "values": each}) + "\n")


def test_reports_are_read_and_the_best_comes_first(tmp_path: Path) -> None:
    space = SweepSpace(tuple({"--a": number} for number in range(4)), "acc", "max")
    trials = open_trials(tmp_path / "sweep", space, ("train.py",), standing)
    report(trials[1].folder, {"step": 1, "acc": 0.5}, {"engine_step": 2, "loss": 1}, {"acc": 0.25})
    report(trials[1].folder, {"step": 9, "acc": 9.0}, rank=1)
    assert trials[1].read() == [(1.0, 0.5), (2.0, 0.25)] and trials[1].read() == []
    report(trials[1].folder, {"step": 3, "acc": "nan"})
    [(step, value)] = trials[1].read()
    assert step == 3 and value != value
    report(trials[2].folder, {"step": 1, "acc": 0.125})
    report(trials[3].folder, {"step": 1, "acc": 0.75})
    for trial in trials:
        trial.read()
    assert [trial.number for trial in ranked(trials, "max")] == [4, 3, 1, 2]
    assert [trial.number for trial in ranked(trials, "min")] == [3, 4, 1, 2]
    write_results(tmp_path, trials)
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert rows[0] == "trial,state,--a,acc,step,folder" and rows[4].startswith("4,new,3,0.75,1,")


def test_reports_without_steps_are_counted(tmp_path: Path) -> None:
    [trial] = open_trials(tmp_path, SweepSpace(({"--a": 1},)), ("train.py",), standing)
    report(trial.folder, {"loss": 3}, {"loss": 2})
    assert trial.read() == [(1.0, 3.0), (2.0, 2.0)]
    report(trial.folder, {"step": 0, "loss": 1}, {"loss": 0})
    assert trial.read() == [(0.0, 1.0), (0.0, 0.0)]


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    space = SweepSpace(({"--a": 1},))
    open_trials(tmp_path, space, ("tarin.py",), standing)  # nothing has begun: it may be corrected
    [trial] = open_trials(tmp_path, space, ("train.py",), standing)
    (trial.folder / "launcher.json").write_text("{}")
    open_trials(tmp_path, space, ("train.py",), standing)
    with pytest.raises(LaunchError, match="another sweep or command"):
        open_trials(tmp_path, space, ("other.py",), standing)
    open_trials(tmp_path, space, ("other.py",), standing, compared=len)
    with pytest.raises(LaunchError, match="another sweep or command"):
        open_trials(tmp_path, SweepSpace(({"--a": 2},)), ("train.py",), standing, compared=len)


def test_a_sweep_is_alone_in_its_folder_and_keeps_its_command_to_itself(tmp_path: Path) -> None:
    fd = hold(tmp_path / "a" / "b")
    with pytest.raises(LaunchError, match="another `zlaunch sweep` is using it"):
        hold(tmp_path / "a" / "b")
    os.close(fd)
    os.close(hold(tmp_path / "a" / "b"))
    open_trials(tmp_path, SweepSpace(({"--a": 1},)), ("--env", "TOKEN=x", "train.py"), standing)
    assert (tmp_path / "sweep.json").stat().st_mode & 0o777 == 0o600


def test_a_trial_whose_folder_is_gone_has_ended(tmp_path: Path) -> None:
    [trial] = open_trials(tmp_path, SweepSpace(({"--a": 1},)), ("train.py",), standing)
    assert trial.state == "new" and not trial.has_ended
    trial.folder.rmdir()
    assert trial.state == "gone" and trial.has_ended
