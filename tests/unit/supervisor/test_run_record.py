"""Test where a run goes on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zlaunch.plan.options import Program
from zlaunch.supervisor.found_runs import find_runs
from zlaunch.supervisor.run_folder import (
    begun,
    first_batches,
    made_engine,
    queued,
    read,
    resume_folder,
    saved,
)
from zlaunch.system.messages import MadeEngine, Saved


def note(
    run_dir: Path, run_id: str, folder: str, time: float, job: str | None = None, script: str = "a.py"
) -> None:
    run_dir.mkdir(exist_ok=True)
    worker = SimpleNamespace(argv=("python", "-m", "bootstrap", script, "--local_rank=0", "--config", "x"))
    nodes = [SimpleNamespace(workers=[worker])]
    plan: Any = SimpleNamespace(run_dir=str(run_dir), run_id=run_id, nodes=nodes)
    saved(plan, Saved(0, "n", "x", folder, 1, time))
    if job is not None:
        path = run_dir / "checkpoint.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "job": job}))


TARGET = Program("script", "a.py", ("--config", "x"), True, ())


def test_a_restart_goes_on_and_a_new_run_in_the_same_folder_does_not(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert resume_folder(str(run_dir), "a", 1, TARGET, {}) is None
    note(run_dir, "a", "/saved", 1.0)
    assert resume_folder(str(run_dir), "a", 1, TARGET, {}) == "/saved"
    assert resume_folder(str(run_dir), "a", 0, TARGET, {}) is None
    assert resume_folder(str(run_dir), "b", 1, TARGET, {}) is None


def test_a_requeued_job_finds_the_folders_of_its_earlier_starts(tmp_path: Path) -> None:
    note(tmp_path / "one", "a", "/older", 1.0, job="17")
    note(tmp_path / "two", "b", "/newer", 2.0, job="17")
    note(tmp_path / "other", "c", "/other", 3.0, job="18")
    note(tmp_path / "second", "c", "/of another run in the job", 3.0, job="17", script="b.py")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "checkpoint.json").write_text("{")
    again = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}
    assert resume_folder(str(tmp_path / "three"), "d", 0, TARGET, again) == "/newer"
    for first in ({"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "0"}, {}):
        assert resume_folder(str(tmp_path / "three"), "d", 0, TARGET, first) is None


def test_a_queued_run_keeps_its_place_and_its_command_when_it_begins(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    queued(str(tmp_path / "first"), "a", ["here"], 2, ["--num_gpus=2", "a.py"])
    queued(str(tmp_path / "second"), "b", ["here"], 1, ["b.py"])
    begun(str(tmp_path / "first"), "a", ["here"], 2)
    begun(str(tmp_path / "first"), "a", ["here"], 2, attempt=1)
    assert [run.name for run in find_runs(tmp_path)] == ["first", "second"]
    record = read(tmp_path / "first")
    assert record is not None and record.command == ("--num_gpus=2", "a.py") and record.attempt == 1
    assert record.pid == os.getpid() and record.asked is not None and record.started > record.asked
    begun(str(tmp_path / "first"), "c", ["here"], 2)  # another run, in the same folder
    assert [run.name for run in find_runs(tmp_path)] == ["second", "first"]


def test_the_batches_of_the_first_attempt_are_kept(tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(run_id="id", run_dir=str(tmp_path), run_world_size=3)
    assert first_batches(str(tmp_path), "id", 1) == ()
    for attempt, size in ((0, 6), (0, 12), (1, 4), (0, "x"), (0, 0)):
        made_engine(plan, attempt, MadeEngine(0, "n", size, 2))
    assert first_batches(str(tmp_path), "id", 1) == ((6, 2, 3), (12, 2, 3))
    assert first_batches(str(tmp_path), "id", 0) == ()
    assert first_batches(str(tmp_path), "other", 1) == ()
