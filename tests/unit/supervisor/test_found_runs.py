"""Test how a run stands by its record and its folder's lock, after a reboot and from another container."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.tools import plain_tools
from tests.unit.ui.folders import write_run
from zlaunch.cli.main import main
from zlaunch.errors import LaunchError
from zlaunch.slurm.commands import newest_job_of
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.found_runs import FoundRun, find_runs, look_into, meant
from zlaunch.supervisor.run_files import EventFile
from zlaunch.supervisor.run_folder import make_run_dir
from zlaunch.system.events import encode


def found(folder: Path, **changed: object) -> FoundRun:
    """Return a run of this process, with a changed record."""
    run_folder.begun(str(folder), "run", ["localhost"], 1)
    path = folder / "launcher.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    record = run_folder.read(folder)
    assert record is not None
    return FoundRun("run", folder, record)


def test_a_run_whose_launcher_lives_runs(tmp_path: Path) -> None:
    assert found(tmp_path).state == "running"
    assert found(tmp_path, start_ticks=1).state == "gone"


def test_a_process_of_another_boot_is_another_one(tmp_path: Path) -> None:
    assert found(tmp_path, boot="another").state == "gone"


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_in_another_pid_namespace_is_known_by_its_lock(tmp_path: Path, shared: bool) -> None:
    elsewhere = {"pid_namespace": 1, "pid": 1, "start_ticks": 1}  # a container of this host
    lock = make_run_dir(tmp_path, shared=shared)
    assert lock is not None
    assert found(tmp_path, **elsewhere).state == "running"
    os.close(lock)
    assert found(tmp_path, **elsewhere).state == "gone"
    assert found(tmp_path, pid_namespace=1).state == "gone", "the process with its id here is another one"


def test_launchers_that_share_a_folder_do_not_keep_each_other_out(tmp_path: Path) -> None:
    locks = [make_run_dir(tmp_path, shared=True) for _ in range(2)]
    for lock in locks:
        assert lock is not None
        os.close(lock)


def test_the_record_of_a_later_version_is_read(tmp_path: Path) -> None:
    assert found(tmp_path, something_new=7).state == "running"


def test_folders_that_vanish_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stays", "vanishes", "inner/deep"):
        (tmp_path / name).mkdir(parents=True)
        run_folder.begun(str(tmp_path / name), name, ["localhost"], 1)
    there = os.path.lexists

    def lexists(path: Path) -> bool:
        known = there(path)
        if path.parent.name == "vanishes":
            shutil.rmtree(path.parent, ignore_errors=True)
        return known

    monkeypatch.setattr(os.path, "lexists", lexists)
    found = look_into(tmp_path)
    assert sorted(run.name for run in found.runs) == ["inner/deep", "stays"]
    assert not found.broken and not found.refused


def test_a_folder_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(LaunchError, match=f"{tmp_path}: Permission denied"):
        find_runs(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e18])
def test_a_record_with_numbers_that_no_calendar_has_is_none(tmp_path: Path, number: float) -> None:
    run_folder.begun(str(tmp_path), "run", ["localhost"], 1)
    path = tmp_path / "launcher.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ended": number}))
    assert run_folder.read(tmp_path) is None


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    os.mkfifo(tmp_path / "launcher.json")
    assert run_folder.read(tmp_path) is None
    with pytest.raises(OSError, match="is not a file"):
        list(EventFile(tmp_path / "events.jsonl").read())


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that counts its calls; the folder has a run of SLURM job 27 on another host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zlaunch.slurm.commands._listing", None, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{plain_tools(tmp_path / 'tools')}")
    (tmp_path / "bin").mkdir()
    for job, name in (("27", "far"), ("28", "further")):
        spawn = {"type": "spawn", "rank": 0, "host": "node2", "pid": 9}
        run = write_run(
            tmp_path / "runs", name, ended=None, host="node2", slurm_job=job, exit_code=None, log="hello\n"
        )
        (run / "events.jsonl").write_bytes(encode(spawn))
    return tmp_path / "bin" / "squeue"


def answer(squeue: Path, *lines: str, code: int = 0) -> None:
    text = "".join(f"echo '{line}'\n" for line in lines)
    squeue.write_text(f"#!/bin/sh\nprintf x >>{squeue}.calls\n{text}exit {code}\n")
    squeue.chmod(0o755)


def test_a_run_whose_slurm_job_has_ended_is_gone(squeue: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer(squeue, "27|CANCELLED|N/A", "28|RUNNING|2026-01-01T00:00:00", "30|PENDING|N/A")
    assert [run.state for run in find_runs(Path("runs"))] == ["gone", "on node2"]
    assert main(["ps", "far"]) == 0
    said = capfd.readouterr().out
    assert "far: gone, SLURM job 27" in said and "unknown" in said and "running" not in said
    assert main(["logs", "-f", "far"]) == 0, "it does not wait for an end"
    followed = capfd.readouterr()
    assert "hello" in followed.out and "Ctrl-C" not in followed.err
    for command in ("stacks", "stop"):
        assert main([command, "far"]) == 2
        assert "has already ended: its SLURM job 27 is gone" in capfd.readouterr().err
    assert main(["wait", "far"]) == 1
    assert "the launcher was killed and wrote no exit code" in capfd.readouterr().err
    assert main(["wait", "--timeout=0", "further"]) == 124, "squeue tells of its end"
    assert "further has not ended" in capfd.readouterr().err
    assert Path(f"{squeue}.calls").read_text() == "x", "squeue is asked once"


@pytest.mark.parametrize("there", [True, False])
def test_without_an_answer_of_squeue_a_run_stays_on_its_host(squeue: Path, there: bool) -> None:
    if there:
        answer(squeue, "slurm_load_jobs error", code=1)
    assert [run.state for run in find_runs(Path("runs"))] == ["on node2"] * 2


def test_a_list_of_jobs_says_nothing_of_a_run_that_has_just_begun(squeue: Path) -> None:
    answer(squeue)
    write_run(Path("runs"), "new", ended=None, host="node2", slurm_job="31", started=time.time() + 1)
    assert [run.state for run in find_runs(Path("runs"))] == ["gone", "gone", "on node2"]


@pytest.mark.parametrize(
    "job",
    ["27|PENDING|2026-12-24T00:00:00", "27|RUNNING|2100-01-01T00:00:00"],
    ids=["in the queue again", "started again"],
)
def test_the_run_of_a_requeued_job_is_gone(squeue: Path, job: str) -> None:
    answer(squeue, job)
    assert {run.name: run.state for run in find_runs(Path("runs"))}["far"] == "gone"


def test_the_id_of_a_requeued_job_means_the_run_of_its_last_start(squeue: Path) -> None:
    write_run(Path("runs"), "again", slurm_job="27", slurm_restarts=1, started=time.time())
    assert meant("27") == "runs/again"
    write_run(Path("runs"), "other", slurm_job="27", slurm_restarts=1, started=time.time() + 1)
    with pytest.raises(LaunchError, match="SLURM job 27 has 2 runs, such as again, other"):
        meant("27")


def test_wait_waits_for_a_job_that_has_no_run_yet(squeue: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The job of another folder, and tasks of an array, are not meant."""
    here = Path.cwd()
    answer(
        squeue,
        f"35|N/A|2100-01-01T00:00:00|{here}",
        "36|N/A|2100-01-02T00:00:00|/elsewhere",
        f"37|1|2100-01-03T00:00:00|{here}",
    )
    scontrol = squeue.with_name("scontrol")
    scontrol.write_text("#!/bin/sh\necho 'JobId=35 JobState=PENDING BatchFlag=1'\n")
    scontrol.chmod(0o755)
    assert newest_job_of(here, after=time.time()) == "35"
    assert newest_job_of(here, after=8e9) == ""
    assert main(["wait", "--timeout=0"]) == 124
    assert "SLURM job 35 is newer than the newest run: waiting for it" in capfd.readouterr().err
