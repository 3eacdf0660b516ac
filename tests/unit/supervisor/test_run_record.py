"""Test where a run goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zlaunch.plan.plan import Program
from zlaunch.supervisor.run_record import resume_folder, saved


def note(
    run_dir: Path, run_id: str, folder: str, time: float, job: str | None = None, script: str = "a.py"
) -> None:
    run_dir.mkdir(exist_ok=True)
    worker = SimpleNamespace(argv=("python", "-m", "bootstrap", script, "--local_rank=0", "--config", "x"))
    nodes = [SimpleNamespace(workers=[worker])]
    plan: Any = SimpleNamespace(run_dir=str(run_dir), run_id=run_id, nodes=nodes)
    saved(plan, {"folder": folder, "tag": "x", "step": 1, "time": time})
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
