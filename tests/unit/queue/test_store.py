"""Test what the queue's file keeps."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zlaunch.errors import LaunchError
from zlaunch.queue.schedule import Demand
from zlaunch.queue.store import Store, Submission

ODD = "\udcff is no UTF-8"


def submission(number: int = 0, **more: object) -> Submission:
    known = {
        "run_id": f"run{number}",
        "run_dir": f"/runs/{number}",
        "options": ("--quiet",),
        "command": ("train.py", ODD),
        "cwd": "/",
        "umask": 0o22,
        "demand": Demand({"localhost": (0, 1)}, 1, None),
        "names": {},
        "after": ("/runs/before",),
    }
    return Submission(**{**known, **more})  # type: ignore[arg-type]  # keywords of tests


def test_a_job_is_kept_as_it_was_submitted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job_id = store.add(submission(), {"A": ODD})
    again = Store(tmp_path)
    job = again.find(job_id)
    assert job is not None and job.submission == submission()
    assert (job.state, job.slots, job.attempt) == ("waiting", {}, 0)
    assert again.environ(job_id) == {"A": ODD}
    assert stat.S_IMODE(os.stat(tmp_path / "jobs.sqlite").st_mode) == 0o600


def test_a_job_changes_its_state_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job_id = store.add(submission(), {"TOKEN": "secret"})
    [waiting] = store.jobs("waiting")
    assert not store.ask(waiting, "cancel")
    assert store.start(job_id, {"localhost": (0, 1)})
    assert not store.start(job_id, {"localhost": (0, 1)}), "it has been started already"
    assert not store.end(job_id, "waiting", 1, "cancelled")
    [before] = store.jobs("running")
    assert store.ask(before, "preempt")
    assert not store.ask(before, "timeout"), "it has been asked for another thing since"
    [job] = store.jobs("running")
    assert (job.slots, job.wish) == ({"localhost": (0, 1)}, "preempt")
    assert not store.wait_again(before, "", attempt=1, failures=0)
    assert store.wait_again(job, "preempted", attempt=1, failures=0)
    [job] = store.jobs("waiting")
    assert (job.slots, job.wish, job.attempt, job.why) == ({}, "", 1, "preempted")
    assert store.end(job_id, "waiting", 7, "why") and not store.end(job_id, "waiting", 8, "again")
    [job] = store.jobs("ended")
    assert (job.exit_code, job.why) == (7, "why")
    assert store.find(10**30) is None
    assert store.of_run(Path("/runs/0")) == store.find(job_id) and store.of_run(Path("/runs/\udcff")) is None
    assert b"secret" not in (tmp_path / "jobs.sqlite").read_bytes()


def test_ids_are_not_used_again_and_old_ends_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlaunch.queue.store._KEPT", 2)
    store = Store(tmp_path)
    for number in range(5):
        job_id = store.add(submission(number), {})
        assert job_id == number + 1
        store.end(job_id, "waiting", 0, "")
    assert [job.id for job in store.jobs("ended")] == [4, 5]


def test_a_job_that_waits_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlaunch.queue.store._KEPT", 2)
    store = Store(tmp_path)
    waiting, running = store.add(submission(), {}), store.add(submission(1), {})
    assert store.start(running, {"localhost": (0, 1)})
    for number in range(2, 7):
        store.end(store.add(submission(number), {}), "waiting", 0, "")
    assert [job.id for job in store.jobs("waiting", "running")] == [waiting, running]


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_text("something else, and long enough to be read as a header of a file")
    with pytest.raises(LaunchError, match=r"jobs\.sqlite"):
        Store(tmp_path)
