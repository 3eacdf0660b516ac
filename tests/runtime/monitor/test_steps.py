"""Test what trackers get of the steps of an engine, and the split of a step's time."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import os
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.workers import run_workers
from zlaunch.runtime.errors import MonitorError


def _train(folder: str, extra: dict[str, Any], steps: int) -> tuple[dict[str, list[float]], str]:
    """Return the metrics of each step, and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return _steps(folder, extra, steps), out.getvalue()


def _steps(folder: str, extra: dict[str, Any], steps: int) -> dict[str, list[float]]:
    zlaunch.init_distributed()
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        **extra,
    }
    engine, *_ = zlaunch.initialize(model=nn.Linear(4, 4), config=config)
    seen: dict[str, list[float]] = {"lr": [], "train_loss": [], "grad_norm": [], "step": []}
    losses: list[float] = []
    while engine.global_steps < steps:
        x = torch.randn(2, 4, dtype=torch.float16 if "fp16" in extra else torch.float32)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        losses.append(float(loss.detach()))
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last:
            seen["lr"].append(engine.get_lr()[0])
            seen["train_loss"].append(sum(losses) / len(losses))  # both ranks have the same batches
            losses.clear()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            seen["grad_norm"].append(norm)
            seen["step"].append(engine.global_samples)
            engine.monitor.write_events([("own", engine.global_steps, engine.global_samples)])
    engine.destroy()
    return seen


def column(path: Path, index: int) -> list[float]:
    with path.open(newline="") as file:
        return [float(row[index]) for row in list(csv.reader(file))[1:]]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_step_is_written_once(stage: int, tmp_path: Path) -> None:
    extra = {"zero_optimization": {"stage": stage}}
    (first, _), _ = run_workers(_train, 2, str(tmp_path), extra, 3)
    job = tmp_path / "job"
    assert first["step"] == [8, 16, 24]
    for name in ("lr", "train_loss", "grad_norm"):
        path = job / f"Train_Samples_{name}.csv"
        assert column(path, 0) == first["step"] and column(path, 1) == pytest.approx(first[name])
    assert column(job / "own.csv", 1) == [1, 2, 3]
    assert {path.name for path in job.iterdir()} == {
        "own.csv",
        *(f"Train_Samples_{name}.csv" for name in ("lr", "train_loss", "grad_norm")),
    }


def test_the_loss_scale_is_written_with_fp16(tmp_path: Path) -> None:
    run_workers(_train, 1, str(tmp_path), {"fp16": {"enabled": True, "loss_scale": 128.0}}, 2)
    assert column(tmp_path / "job" / "Train_Samples_loss_scale.csv", 1) == [128.0, 128.0]


LINE = re.compile(
    r"zlaunch: time \(ms\) of step (\d+): forward ([\d.]+), backward ([\d.]+), step ([\d.]+), "
    r"rest (-?[\d.]+)(?:, mean of (\d+) steps)?"
)


@pytest.mark.parametrize(
    ("every", "steps", "means"),
    [(None, [1, 2, 3, 4], ["", "", "", ""]), (2, [2, 4], ["2", "2"])],
)
def test_the_split_of_a_steps_time(
    every: int | None, steps: list[int], means: list[str], tmp_path: Path
) -> None:
    extra = {"wall_clock_breakdown": True, "steps_per_print": every}
    (_, printed), (_, other) = run_workers(_train, 2, str(tmp_path), extra, 4)
    found = LINE.findall(printed)
    assert not LINE.search(other)
    assert [int(line[0]) for line in found] == steps and [line[5] for line in found] == means
    for part in ("forward", "backward", "step"):
        times = column(tmp_path / "job" / f"Train_Samples_elapsed_time_ms_{part}.csv", 1)
        assert len(times) == 4 and all(time > 0 for time in times)
    assert all(float(line[4]) >= 0 for line in found)


@pytest.mark.parametrize(("every", "steps"), [(None, [1, 2, 3]), (2, [2])])
def test_the_memory_after_a_step(every: int | None, steps: list[int], tmp_path: Path) -> None:
    extra = {"memory_breakdown": True, "steps_per_print": every}
    (_, printed), (_, other) = run_workers(_train, 2, str(tmp_path), extra, 3)
    found = re.findall(r"zlaunch: memory \(GB\) after step (\d+): host ([\d.]+)", printed)
    assert [int(step) for step, _ in found] == steps and all(float(gb) > 0.01 for _, gb in found)
    assert "memory (GB)" not in other


def _load_and_evaluate(folder: str) -> tuple[str, list[float]]:
    """Train one step, load an earlier one, evaluate, train two steps; return what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "wall_clock_breakdown": True,
            "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        }
        engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=config)

        def step() -> None:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()

        engine.save_checkpoint(folder)
        for _ in range(3):
            step()
        engine.load_checkpoint(folder)
        with torch.no_grad():
            for _ in range(200):
                engine(torch.ones(1, 2))
        step()
        step()
        engine.destroy()
    return out.getvalue(), column(Path(folder, "job", "Train_Samples_lr.csv"), 0)


def test_evaluation_and_a_loaded_checkpoint_are_no_part_of_a_step(tmp_path: Path) -> None:
    ((printed, steps),) = run_workers(_load_and_evaluate, 1, str(tmp_path))
    assert [int(line[0]) for line in LINE.findall(printed)] == [
        1,
        2,
        3,
        2,
    ]  # the first after the load has no begin
    assert steps == [1, 2, 3, 1, 2]
    times = column(tmp_path / "job" / "Train_Samples_elapsed_time_ms_forward.csv", 0)
    assert times == [1, 2, 3, 2]


def _models_own_names(folder: str) -> tuple[Any, ...]:
    class Model(nn.Linear):
        metrics, observers = "the model's", "the model's, too"

    config = {"train_micro_batch_size_per_gpu": 1, "csv_monitor": {"enabled": True, "output_path": folder}}
    engine, *_ = zlaunch.initialize(model=Model(2, 2), config=config)
    found = engine.metrics, engine.observers
    engine.destroy()
    return found


def test_common_names_of_a_models_attributes_are_the_models(tmp_path: Path) -> None:
    assert run_workers(_models_own_names, 1, str(tmp_path)) == [("the model's", "the model's, too")]


def _open_in_a_file(folder: str) -> str:
    zlaunch.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
    }
    model = nn.Linear(2, 2)
    with pytest.raises(MonitorError) as caught:
        zlaunch.initialize(model=model, config=config)
    config["csv_monitor"] = {"enabled": False}
    engine, *_ = zlaunch.initialize(model=model, config=config)  # the model is as it was
    engine.destroy()
    return str(caught.value)


def test_every_rank_is_told_that_a_tracker_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, other = run_workers(_open_in_a_file, 2, str(tmp_path / "file"))
    assert first.startswith("csv_monitor: ") and other == f"on rank 0, {first}"


def _own_name(folder: str) -> None:
    rank = int(os.environ["RANK"])
    section = {"enabled": True, "output_path": folder, "job_name": f"job-{rank}"}
    config = {"train_micro_batch_size_per_gpu": 1, "csv_monitor": section}
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=config)
    engine.destroy()


def test_a_name_may_differ_between_ranks(tmp_path: Path) -> None:
    run_workers(_own_name, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["job-0"]


def _save_with_a_key(folder: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "comet": {"enabled": False, "api_key": "secret-key"},
    }
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=config)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_a_checkpoint_has_no_key(tmp_path: Path) -> None:
    run_workers(_save_with_a_key, 1, str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(b"secret-key" in path.read_bytes() for path in files)


def test_an_engine_that_is_dropped_is_not_kept_alive(tmp_path: Path) -> None:
    (alive,) = run_workers(_drop, 1, str(tmp_path))
    assert not alive


def _drop(folder: str) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": folder},
    }
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    reference = weakref.ref(engine)
    del engine, _
    gc.collect()
    return reference() is not None
