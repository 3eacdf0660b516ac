"""Test `zlaunch tune` on real runs."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT, alive
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, wait_until

SCRIPT = """
    import argparse, os, sys, time, torch, zlaunch
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--fails", default="")
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    engine, *_ = zlaunch.initialize(model=model, config=args.config)
    micro = engine.train_micro_batch_size_per_gpu()
    stage = engine.zero_optimization_stage()
    if args.fails == "memory" and (stage < 2 or micro > 2):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if args.fails == "always":
        raise ValueError("nothing works")
    while True:
        rows = args.rows or micro
        loss = engine(torch.randn(rows, 16)).square().mean()
        engine.backward(loss)
        engine.step()
        time.sleep({0: 0.15, 1: 0.15, 2: 0.05, 3: 0.2}[stage] * (0.2 + 0.8 / micro))
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


TUNE = (
    "tune",
    "--steps=3",
    "--warmup=1",
    "--num_gpus=2",
    "--no_local_rank",
    "train.py",
    "--config",
    "ds.json",
)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "tune" / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def tuned(folder: Path) -> Any:
    return json.loads((folder / "tune" / "ds.tuned.json").read_text())


def nothing_is_left(folder: Path) -> None:
    for path in folder.glob("tune/runs/*/launcher.json"):
        assert not alive(json.loads(path.read_text())["run_id"])


@pytest.mark.exhaustive
def test_the_fastest_that_fits_is_written(folder: Path) -> None:
    done = zlaunch(folder, *TUNE, "--fails=memory", limit_s=3 * LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = {row["variant"]: row["verdict"] for row in rows_of(folder)}
    assert trials["as it is"] == "ok" and trials["stage 2"] == "ok"
    assert trials["stage 1"] == "out of memory" or trials["stage 0"] == "out of memory"
    assert trials["stage 2, micro-batch 4"] == "out of memory"
    best = tuned(folder)
    assert best["zero_optimization"]["stage"] == 2 and best["train_micro_batch_size_per_gpu"] == 2
    assert (best["gradient_accumulation_steps"], best["train_batch_size"]) == (2, 8)
    assert done.stdout.splitlines()[-1].startswith("tune/ds.tuned.json: stage 2, ")
    nothing_is_left(folder)
    again = zlaunch(folder, *TUNE, "--fails=memory")
    assert again.returncode == 0 and tuned(folder) == best
    assert len(rows_of(folder)) == len(trials), "what has been measured is not measured again"
    other = zlaunch(folder, *TUNE)
    assert other.returncode == 2 and "tune contains the results of another command" in other.stderr


@pytest.mark.exhaustive
def test_a_script_with_batches_of_its_own(folder: Path) -> None:
    done = zlaunch(folder, *TUNE, "--rows=3")
    assert done.returncode == 0, done.stderr
    assert "input has 3 rows, train_micro_batch_size_per_gpu is 1: it is not changed" in done.stdout
    assert tuned(folder)["train_micro_batch_size_per_gpu"] == 1
    assert not any("micro-batch" in row["variant"] for row in rows_of(folder))


@pytest.mark.exhaustive
def test_no_run_is_without_a_verdict(folder: Path) -> None:
    done = zlaunch(folder, *TUNE, "--fails=always")
    assert done.returncode == 1 and not (folder / "tune" / "ds.tuned.json").exists()
    verdicts = {row["verdict"] for row in rows_of(folder)}
    assert verdicts == {"failed: ValueError: nothing works"}
    assert "no run came to a speed" in done.stdout
    nothing_is_left(folder)


@pytest.mark.exhaustive
def test_ctrl_c_leaves_the_best_so_far(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "zlaunch", *TUNE],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    second = folder / "tune" / "runs" / "002" / "launcher.json"
    wait_until(second.exists, "a second run")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "the same command goes on" in err and "Traceback" not in err
    assert "as it is" in out and tuned(folder)["zero_optimization"]["stage"] == 3
    nothing_is_left(folder)


@pytest.mark.rotated
def test_a_script_without_an_engine_is_run_once(folder: Path) -> None:
    (folder / "train.py").write_text("print('no engine here')")
    done = zlaunch(folder, *TUNE)
    why = 'it printed "no engine here" last'
    assert done.returncode == 2 and f"train.py made no step ({why}): train with an engine" in done.stderr
    assert [row["verdict"] for row in rows_of(folder)] == [f"ended without a step: {why}"]


RESUMES = """
    import sys, torch, zlaunch
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(16, 16), config=sys.argv[2])
    engine.save_checkpoint("out")
    engine.load_checkpoint(zlaunch.resume_dir("out") if "--checked" in sys.argv else "out")
"""


@pytest.mark.exhaustive
def test_a_trial_that_loads_the_end_of_another_says_so(folder: Path) -> None:
    (folder / "train.py").write_text(textwrap.dedent(RESUMES))
    done = zlaunch(folder, *TUNE[:3], "--num_gpus=1", *TUNE[4:])
    why = f"it loaded {folder}/out/global_step0 (step 0)"
    assert done.returncode == 2 and f"train.py made no step ({why}): train with" in done.stderr
    assert [row["verdict"] for row in rows_of(folder)] == [f"ended without a step: {why}"]


@pytest.mark.exhaustive
def test_trials_do_not_resume_from_a_shared_folder(folder: Path) -> None:
    (folder / "train.py").write_text(textwrap.dedent(RESUMES))
    done = zlaunch(folder, *TUNE, "--checked")
    assert done.returncode == 1 and not (folder / "tune" / "ds.tuned.json").exists()
    for row in rows_of(folder):
        trial = f"trial {int(row['number']):03d} of zlaunch tune shares that folder"
        assert (
            row["verdict"].startswith("failed: RuntimeError: resume_dir: out has") and trial in row["verdict"]
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no script given"),
        (["train.py"], "needs one config to tune"),
        (["train.py", "--config", "none.json"], "none.json: no such config"),
        (
            ["--num_gpus", "1", "--steps", "3", "train.py", "--config", "ds.json"],
            "--steps is an option of tune",
        ),
        (["--run_dir", "x", "train.py", "--config", "ds.json"], "--run_dir cannot be used with tune"),
        (["--num_gpus", "0", "train.py", "--config", "ds.json"], "--num_gpus"),
        (["train.py", "--config", "bad.json"], "bad.json"),
    ],
)
def test_mistakes(folder: Path, arguments: list[str], text: str) -> None:
    (folder / "bad.json").write_text('{"zero_optimisation": {}}')
    done = zlaunch(folder, "tune", *arguments)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
