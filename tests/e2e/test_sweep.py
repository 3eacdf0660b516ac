"""Test sweeps with real runs of the queue."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, MATRIX_LIMIT_S, wait_until
from zlaunch.supervisor.run_folder import queued

SCRIPT = """
    import argparse, json, os, time
    import zlaunch
    parser = argparse.ArgumentParser()
    for name in ("--config", "--x", "--steps", "--pause"):
        parser.add_argument(name)
    parser.add_argument("--fails", action="store_true")
    options = parser.parse_args()
    lr = json.load(open(options.config))["optimizer"]["params"]["lr"]
    for step in range(1, int(options.steps) + 1):
        while options.pause and not os.path.exists(options.pause):
            time.sleep(0.05)
        zlaunch.report(step=step, loss=abs(float(options.x) - 3) + lr + 1 / step)
        time.sleep(float(os.environ["STEP_S"]))
    raise SystemExit(9 if options.fails else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, its config, six slots, and a queue of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("STEP_S", "0.01")
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "hosts").write_text("localhost slots=6\n")
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return tmp_path


COMMAND = (
    *("--queue=local", "--hostfile=hosts", "--num_gpus=1", "--no_local_rank", "--no_preload"),
    *("train.py", "--config=ds.json"),
)


def results(folder: Path) -> list[dict[str, str]]:
    with open(folder / "sweeps" / "grid" / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start zlaunch in the folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "zlaunch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.rotated
def test_a_grid_is_run_and_the_best_is_shown(folder: Path) -> None:
    (folder / "grid.yaml").write_text(
        "parameters:\n  --x: [1, 3]\n  optimizer.params.lr: [1e-3]\n  --fails: [false, true]\n"
    )
    done = zlaunch(folder, "sweep", "grid.yaml", *COMMAND, "--steps=4")
    assert done.returncode == 0, done.stderr
    assert "best: trial 3, --x=3 optimizer.params.lr=0.001 --fails=False: loss 0.251" in done.stdout
    rows = results(folder)
    assert [row["state"] for row in rows] == ["done", "failed 9"] * 2
    assert {row["step"] for row in rows} == {"4"}
    assert float(rows[2]["loss"]) == pytest.approx(0.251)
    other = zlaunch(folder, "sweep", "grid.yaml", *COMMAND, "--steps=5")
    assert other.returncode == 2 and "another sweep or command" in other.stderr
    shutil.rmtree(folder / "sweeps" / "grid" / "003")
    changed = ("--dir=sweeps/grid", "--retries=1")  # neither makes it another sweep
    again = zlaunch(folder, "sweep", "grid.yaml", *changed, *COMMAND, "--steps=4")
    assert again.returncode == 0 and "4 trials in sweeps/grid, 3 known" in again.stdout, again
    assert results(folder)[2]["state"] == "done"
    assert "best: trial 3" in again.stdout


@pytest.mark.exhaustive
def test_a_sweep_whose_trials_all_fail_says_why(folder: Path) -> None:
    (folder / "grid.yaml").write_text("parameters:\n  --x: [1, 2]\n")
    (folder / "train.py").write_text("raise RuntimeError('no data')\n")
    done = zlaunch(folder, "sweep", "grid.yaml", *COMMAND)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    assert any(
        line.startswith("every trial has failed; the first: rank 0") and "no data" in line for line in lines
    )
    assert "remove its folder and repeat the command" in lines[-1]


@pytest.mark.exhaustive
def test_a_sweep_that_is_ended_goes_on(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=3\n")
    (folder / "grid.yaml").write_text("parameters:\n  --x: [1, 2, 3, 4, 5]\n")
    arguments = ("sweep", "grid.yaml", *COMMAND, "--steps=2", "--pause=go")
    process = start(folder, *arguments)
    wait_until((folder / "sweeps" / "grid" / "005" / "launcher.json").exists, "all trials queued")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "the same command goes on" in err
    (folder / "go").touch()
    again = zlaunch(folder, *arguments)
    assert again.returncode == 0 and "5 trials in sweeps/grid, 5 known" in again.stdout
    assert "best: trial 3, --x=3: loss 1" in again.stdout and "no trial has reported" not in err
    assert [row["state"] for row in results(folder)] == ["done"] * 5


@pytest.mark.exhaustive
def test_what_is_no_use_is_said(folder: Path) -> None:
    (folder / "grid.yaml").write_text("parameters:\n  hidden: [1, 2]\nmetric: val_los\n")
    process = start(folder, "sweep", "grid.yaml", *COMMAND, "--x=1", "--steps=2", "--pause=go")
    wait_until((folder / "sweeps" / "grid" / "002" / "launcher.json").exists, "all trials queued")
    other = zlaunch(folder, "sweep", "grid.yaml", *COMMAND, "--x=1")
    assert other.returncode == 2 and "another `zlaunch sweep` is using" in other.stderr
    own = folder / "sweeps" / "grid" / "002"
    wait_until((own / "logs" / "rank_00000.log").exists, "the second trial runs")
    own.rename(folder / "gone")
    (folder / "go").touch()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "  2  hidden=2: no val_los, gone" in out, out
    assert "hidden is no key of a config that zlaunch knows; an argument of the script is --hidden" in err
    assert "trial 1 has not reported 'val_los', by which trials are compared; it has reported " in err
    wrong = zlaunch(folder, "sweep", "--num_gpus=1", "train.py")
    assert wrong.returncode == 2


@pytest.mark.exhaustive
def test_a_trial_that_never_came_into_the_queue_is_tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "grid.yaml").write_text("parameters:\n  --x: [1, 2]\n")
    arguments = ("sweep", "grid.yaml", *COMMAND, "--steps=2")
    own = folder / "sweeps" / "grid" / "002"
    assert zlaunch(folder, *arguments).returncode == 0
    shutil.rmtree(own)
    own.mkdir()
    queued(str(own), "x", ["localhost"], 1, ["train.py"])  # and the sweep was killed
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "other"))  # a queue that has never had it
    again = zlaunch(folder, *arguments)
    assert again.returncode == 0 and "2 trials in sweeps/grid, 1 known" in again.stdout
    assert [row["state"] for row in results(folder)] == ["done"] * 2


@pytest.mark.exhaustive
def test_what_is_behind_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_S", "0.1")
    (folder / "grid.yaml").write_text(
        "parameters:\n  --x: [3, 50, 60, 70]\nearly_stopping: {min_steps: 5, factor: 4}\n"
    )
    (folder / "hosts").write_text("localhost slots=1\n")
    done = zlaunch(folder, "sweep", "grid.yaml", *COMMAND, "--steps=60")
    assert done.returncode == 0, done.stderr
    rows = results(folder)
    assert [row["state"] for row in rows] == ["done", *["stopped early"] * 3]
    assert rows[0]["step"] == "60" and all(5 <= float(row["step"]) < 60 for row in rows[1:])
    assert "best: trial 1" in done.stdout


@pytest.mark.exhaustive
def test_what_is_stopped_has_its_time_to_save(folder: Path) -> None:
    (folder / "saves.py").write_text(
        textwrap.dedent("""
            import os, signal, sys, time
            import zlaunch
            def save(*_):
                time.sleep(2)
                open("saved" + os.environ["ZLAUNCH_RUN_ID"], "w").close()
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            for step in range(1, 10**9):
                zlaunch.report(loss=float(sys.argv[1].partition("=")[2]))
                time.sleep(0.1)
                if step == 40 and sys.argv[1] == "--x=1":
                    break
        """)
    )
    (folder / "grid.yaml").write_text(
        "parameters:\n  --x: [1, 2]\nearly_stopping: {min_steps: 3, factor: 2}\n"
    )
    done = zlaunch(folder, "sweep", "grid.yaml", *COMMAND[:-2], "--grace=100", "saves.py")
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in results(folder)] == ["done", "stopped early"]
    assert len(list(folder.glob("saved*"))) == 1


@pytest.mark.exhaustive
def test_what_cannot_be_tried_is_refused_before_anything_is_queued(folder: Path) -> None:
    (folder / "grid.yaml").write_text("parameters:\n  optimizer.params.lr: [0.1, fast]\n")
    (folder / "keys.yaml").write_text("parameters:\n  optimizer.params.lr: [0.1]\n")
    (folder / "deep.yaml").write_text("parameters:\n  train_batch_size.x: [0.1]\n")
    for arguments, text in (
        (("grid.yaml", *COMMAND), "lr"),
        (("none.yaml", *COMMAND), "none.yaml: No such file"),
        (("keys.yaml", *COMMAND[:-1]), "is a config key"),
        (("deep.yaml", *COMMAND), "train_batch_size is 1 in the config"),
        (("keys.yaml", "--run_dir=x", *COMMAND), "--run_dir cannot be used with sweep"),
        (("--at_once=2", "keys.yaml", *COMMAND), "--at_once needs --queue slurm"),
        (("keys.yaml",), "no script given"),
    ):
        done = zlaunch(folder, "sweep", *arguments)
        assert done.returncode == 2 and text in done.stderr, (arguments, done)
        assert "Traceback" not in done.stderr
    assert not list(folder.glob("sweeps/*/*/launcher.json"))


@pytest.mark.exhaustive
def test_thirty_trials_find_the_best_with_half_of_the_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_S", "0.05")
    values = [float((7 * number) % 30) / 3 for number in range(30)]  # 3.0 is among them
    (folder / "grid.yaml").write_text(
        f"parameters:\n  --x: {values}\nearly_stopping: {{min_steps: 10, factor: 3}}\n"
    )
    done = zlaunch(folder, "sweep", "grid.yaml", *COMMAND, "--steps=180", limit_s=MATRIX_LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "best: trial 28, --x=3:" in done.stdout, done.stdout
    steps = sum(float(row["step"]) for row in results(folder))
    print(steps / (30 * 180))
    assert steps <= 30 * 180 / 2
