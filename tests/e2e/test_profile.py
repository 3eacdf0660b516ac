"""Test the trace that `--profile` writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.e2e.helpers import run

TRAIN = """
    import torch, zlaunch
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    engine, *_ = zlaunch.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    })
    own = None
    if OWN:
        own = torch.profiler.profile()
        own.start()
    while engine.global_steps < 6:
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
    if own is not None:
        own.stop()
    print("trained", flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("steps", "count"), [("3-4", 2), ("1", 1), ("6-9", 1)])
def test_a_trace_has_the_parts_of_its_steps(steps: str, count: int, tmp_path: Path) -> None:
    script = TRAIN.replace("OWN", "False")
    launch = run(tmp_path, "--num_gpus=2", "--no_local_rank", "--profile", steps, script=script)
    assert launch.process.returncode == 0, launch.err
    (path,) = (tmp_path / "run" / "traces").iterdir()
    assert path.name == "rank_00000.json.gz" and f"zlaunch: trace: {path} (open it in" in launch.out
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    names = [event["name"] for event in events]
    assert names.count("zlaunch::forward") == names.count("zlaunch::backward") == 2 * count
    assert any(name.startswith("zlaunch::gather ") for name in names) and "aten::addmm" in names


def test_a_script_without_an_engine_has_no_trace(tmp_path: Path) -> None:
    launch = run(tmp_path, "--no_local_rank", "--profile=2", script="print(1)")
    assert launch.process.returncode == 0, launch.err
    assert "--profile has written no trace" in launch.err and "zlaunch.initialize" in launch.err


@pytest.mark.exhaustive
def test_steps_that_never_come(tmp_path: Path) -> None:
    script = TRAIN.replace("OWN", "False")
    launch = run(tmp_path, "--no_local_rank", "--profile=9-10", script=script)
    assert launch.process.returncode == 0, launch.err
    assert "no trace: the run ended at step 6, before step 9" in launch.out


@pytest.mark.exhaustive
def test_a_script_with_a_profiler_of_its_own_trains(tmp_path: Path) -> None:
    script = TRAIN.replace("OWN", "True")
    launch = run(tmp_path, "--no_local_rank", "--profile=2", script=script)
    assert launch.process.returncode == 0 and "trained" in launch.out, launch.err
    assert "no trace in " in launch.out and not (tmp_path / "run" / "traces").exists()


@pytest.mark.exhaustive
def test_a_folder_that_takes_no_trace(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traces").write_text("a file")
    launch = run(tmp_path, "--no_local_rank", "--profile=2", script=TRAIN.replace("OWN", "False"))
    assert launch.process.returncode == 0 and "trained" in launch.out, launch.err
    assert "no trace in " in launch.out and "training continues" in launch.out


@pytest.mark.parametrize("steps", ["0", "5-3", "x", "3-", "-3", ""])
def test_mistakes(steps: str, tmp_path: Path) -> None:
    launch = run(tmp_path, f"--profile={steps}", script="print(1)")
    assert launch.process.returncode == 2 and "is not a step or a range of steps" in launch.err
