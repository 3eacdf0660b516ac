"""Test loading from a folder that does not exist, and from one without a checkpoint."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed import install

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def _load(engine: Any, folder: str, **options: Any) -> tuple[Any, str]:
    """Load; return the result, or the error's text, and what was printed."""
    found: Any
    with redirect_stdout(io.StringIO()) as out:
        try:
            found = engine.load_checkpoint(folder, **options)
        except zlaunch.CheckpointError as error:
            found = str(error)
    return found, out.getvalue()


def _loads(folder: str) -> int:
    rank = join()
    install()
    import deepspeed

    calls: list[tuple[Any, Any]] = [(zlaunch.initialize, {}), (deepspeed.initialize, None)]
    for call, none in calls:
        engine, *_ = call(model=nn.Linear(2, 2), config=CONFIG)
        for nowhere in ("", None):
            with pytest.raises(ValueError, match=f"save_checkpoint: save_dir is {nowhere!r}: name a folder"):
                engine.save_checkpoint(nowhere)
        for tag in (None, "auto", "global_step1"):
            said, _ = _load(engine, f"{folder}/nowhere", tag=tag)
            assert "nowhere: no such folder" in said and "missing_ok=True" in said, said
            assert _load(engine, f"{folder}/nowhere", tag=tag, missing_ok=True) == ((None, none), "")
        for tag in (None, "auto", "global_step1"):
            said, _ = _load(engine, f"{folder}/named/latest", tag=tag, missing_ok=True)
            assert "latest: is a file, expected the folder" in said, said
        said, _ = _load(engine, f"{folder}/named", tag="latest")
        assert "latest: is the file that names the newest checkpoint" in said, said
        for tag in (None, "auto"):
            result, out = _load(engine, f"{folder}/empty", tag=tag)
            assert result == (None, none)
            assert out.count("empty: no checkpoint found") == (rank == 0), out
            assert _load(engine, f"{folder}/empty", tag=tag, missing_ok=True) == ((None, none), "")
        # where the launcher says that this run has saved: the script has not chosen it
        os.environ["ZLAUNCH_RESUME_DIR"] = f"{folder}/nowhere"
        result, out = _load(engine, str(zlaunch.resume_dir()))
        assert result == (None, none) and out.count("nowhere: no checkpoint found") == (rank == 0), out
        del os.environ["ZLAUNCH_RESUME_DIR"]
        assert engine.load_checkpoint(zlaunch.resume_dir(f"{folder}/nowhere")) == (None, none)
        engine.destroy()
    return rank


def test_a_mistyped_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "latest").write_text("global_step1")
    assert run_workers(_loads, 2, str(tmp_path)) == [0, 1]


def _save(folder: str) -> None:
    join()
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(folder)
    engine.destroy()


def _loads_with_other_rates(folder: str) -> list[str]:
    """Load a checkpoint under other learning rates; return the output of each load."""
    join()
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 2}}}
    cases: list[tuple[float, dict[str, Any], Any]] = [
        (1e-3, {}, None),
        (2e-3, {}, None),
        (2e-3, {}, torch.optim.lr_scheduler.StepLR),
        (2e-3, schedule, None),
        (1e-3, {}, "own"),
        (2e-3, {}, "own"),
        (1e-3, {}, "dropped"),
    ]
    said = []
    for index, (rate, more, kind) in enumerate(cases):
        for lr in (1e-3, rate):
            given = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": lr}}, **more}
            made = (lambda optimizer, kind=kind: kind(optimizer, 5)) if isinstance(kind, type) else None
            engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=given, lr_scheduler=made)
            is_first = lr == 1e-3 and not (Path(folder) / str(index)).exists()
            if kind == "own" or (kind == "dropped" and is_first):  # a Trainer keeps its scheduler to itself
                own = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: step / 10)
            if is_first:
                if isinstance(kind, str):
                    own.step()
                engine.save_checkpoint(f"{folder}/{index}")
            else:
                said.append(_load(engine, f"{folder}/{index}")[1])
            engine.destroy()
    return said


def test_a_load_names_both_learning_rates_where_they_differ(tmp_path: Path) -> None:
    said, *_ = run_workers(_loads_with_other_rates, 1, str(tmp_path))
    same, other, scheduled, from_config, own, other_own, dropped = said
    change, after = 'optimizer.param_groups[0]["lr"]', "after the load (with a Trainer: in on_train_begin)"
    rates = "the learning rate is 0.001 from the checkpoint, not 0.002 as configured; to change it, "
    rates = f"zlaunch: warning: {rates}"
    assert same.count("\n") == from_config.count("\n") == own.count("\n") == 1, said
    assert "saved by 1 rank at stage" in same
    assert other.endswith(f"\n{rates}set {change} {after}\n")
    assert (
        f"is 0.0001 from the checkpoint, not 0.001 as configured; to change it, set {change} {after}"
        in dropped
    )
    for each in (scheduled, other_own):
        assert each.endswith(f"\n{rates}set {change} and the scheduler's base_lrs[0] {after}\n")


def test_weights_of_another_model_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_workers(_save, 1, str(tmp_path))
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(zlaunch.CheckpointError, match="does not match the model: none of its 2 weights"):
        zlaunch.load_state_dict_from_zero_checkpoint(other, tmp_path)
    larger = nn.Linear(2, 2)
    larger.extra = nn.Linear(2, 2)
    zlaunch.load_state_dict_from_zero_checkpoint(larger, tmp_path)
    assert "which keep their values: extra.weight, extra.bias" in capsys.readouterr().err
    same = nn.Linear(2, 2)
    zlaunch.load_state_dict_from_zero_checkpoint(same, tmp_path)
    assert torch.equal(same.weight, larger.weight) and not capsys.readouterr().err
    with pytest.raises(zlaunch.CheckpointError, match="no such folder"):
        zlaunch.load_state_dict_from_zero_checkpoint(same, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("trial", "described", "search"),
    [
        ("sweep/001", "sweep/sweep.json", "the sweep"),
        ("tune/runs/001", "tune/tuned.json", "zlaunch tune"),
    ],
)
def test_trials_of_a_search_do_not_share_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial: str, described: str, search: str
) -> None:
    for name in ("shared", f"{trial}/ckpt"):
        (tmp_path / name / "global_step1").mkdir(parents=True)
        (tmp_path / name / "global_step1" / "manifest.json").touch()
    monkeypatch.setenv("ZLAUNCH_RUN_DIR", str(tmp_path / trial))
    monkeypatch.delenv("ZLAUNCH_RESUME_DIR", raising=False)
    shared, own = str(tmp_path / "shared"), str(tmp_path / trial / "ckpt")
    assert (zlaunch.resume_dir(shared), zlaunch.resume_dir(own)) == (shared, own)
    (tmp_path / described).touch()
    assert zlaunch.resume_dir(own) == own
    assert zlaunch.resume_dir(str(tmp_path / "none")) is None
    with pytest.raises(RuntimeError, match=rf"shared has a checkpoint, but trial 001 of {search}"):
        zlaunch.resume_dir(shared)


def _steps_and_saves(folder: str, more: dict[str, Any]) -> tuple[int, str]:
    """Load what is there, make a step, and save; return the rank and what the load has printed."""
    rank = join()
    given = {"train_micro_batch_size_per_gpu": 2, "optimizer": CONFIG["optimizer"], **more}
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=given)
    _, said = _load(engine, folder)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    return rank, said


def _tasks_share_a_folder(folder: str) -> list[str]:
    """Save as task 0 of a job array; return what loads by no task, by task 0 and by task 1 print."""
    join()
    engine, *_ = zlaunch.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(f"{folder}/none")
    os.environ["SLURM_ARRAY_TASK_ID"] = "0"
    engine.save_checkpoint(f"{folder}/shared")
    said = []
    for task in (None, "0", "1"):
        os.environ.pop("SLURM_ARRAY_TASK_ID", None)
        if task is not None:
            os.environ["SLURM_ARRAY_TASK_ID"] = task
        said.append(_load(engine, f"{folder}/shared")[1])
    said.append(_load(engine, f"{folder}/shared", load_module_only=True)[1])
    said.append(_load(engine, f"{folder}/none")[1])
    engine.destroy()
    return said


def test_a_load_warns_of_a_checkpoint_of_another_task_of_the_job_array(tmp_path: Path) -> None:
    (said,) = run_workers(_tasks_share_a_folder, 1, str(tmp_path))
    warning = "shared/global_step0 was saved by task 0 of a job array, and this is task 1: tasks that share"
    assert [warning in each for each in said] == [False, False, True, False, False]


def test_a_load_says_that_other_ranks_make_another_global_batch(tmp_path: Path) -> None:
    run_workers(_steps_and_saves, 2, f"{tmp_path}/a", {})
    ((_, said),) = run_workers(_steps_and_saves, 1, f"{tmp_path}/a", {})
    line = (
        "the global batch is 2 on 1 rank, and was 4 on 2; to keep 4, set gradient_accumulation_steps to 2\n"
    )
    assert said.endswith(f"zlaunch: {line}")
    run_workers(_steps_and_saves, 2, f"{tmp_path}/b", {})
    ((_, said),) = run_workers(_steps_and_saves, 1, f"{tmp_path}/b", {"gradient_accumulation_steps": 2})
    assert "global batch" not in said


@pytest.mark.rotated
def test_the_global_batch_before_is_that_of_the_last_steps(tmp_path: Path) -> None:
    """Not the mean over steps with several sizes, and advice that can be followed."""
    run_workers(_steps_and_saves, 2, str(tmp_path), {})
    run_workers(_steps_and_saves, 1, str(tmp_path), {})
    said = [text for _, text in run_workers(_steps_and_saves, 3, str(tmp_path), {})]
    assert (
        "the global batch is 6 on 3 ranks, and was 2 on 1; 2 cannot be kept: it is not a multiple of 3"
        in said[0]
    )
    said = [text for _, text in run_workers(_steps_and_saves, 2, str(tmp_path), {})]
    assert "the global batch is 4 on 2 ranks, and was 6 on 3; to keep 6, set train_micro_b" in said[0]
    assert said[0].endswith("train_micro_batch_size_per_gpu to 3\n")
