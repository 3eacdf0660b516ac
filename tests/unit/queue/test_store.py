"""Test what the queue's file keeps."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.queue import store as module
from zlaunch.queue.process_settings import ProcessSettings
from zlaunch.queue.schedule import Demand
from zlaunch.queue.store import QueuedJob, Store, Submission, UnreadableJob
from zlaunch.supervisor.end import End

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


def end(store: Store, job_id: int) -> None:
    job = store.find(job_id)
    assert job is not None and store.end(job, End(0, "finished"), "")


def test_a_job_is_kept_as_it_was_submitted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job_id = store.add(submission(), {"A": ODD})
    again = Store(tmp_path)
    job = again.find(job_id)
    assert isinstance(job, QueuedJob) and job.submission == submission()
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
    assert not store.end(waiting, End(1, "failed"), "cancelled")
    [before] = store.jobs("running")
    assert store.ask(before, "preempt")
    assert not store.ask(before, "timeout"), "it has been asked for another thing since"
    [job] = store.jobs("running")
    assert (job.slots, job.wish) == ({"localhost": (0, 1)}, "preempt")
    assert not store.wait_again(before, "", attempt=1, failures=0)
    assert store.wait_again(job, "preempted", attempt=1, failures=0)
    [job] = store.jobs("waiting")
    assert (job.slots, job.wish, job.attempt, job.why) == ({}, "", 1, "preempted")
    assert store.end(job, End(7, "failed"), "why") and not store.end(job, End(8, "failed"), "again")
    [job] = store.jobs("ended")
    assert (job.exit_code, job.cause, job.why) == (7, "failed", "why")
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
        end(store, job_id)
    assert [job.id for job in store.jobs("ended")] == [4, 5]


def test_a_job_that_waits_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlaunch.queue.store._KEPT", 2)
    store = Store(tmp_path)
    waiting, running = store.add(submission(), {}), store.add(submission(1), {})
    assert store.start(running, {"localhost": (0, 1)})
    for number in range(2, 7):
        end(store, store.add(submission(number), {}))
    assert [job.id for job in store.jobs("waiting", "running")] == [waiting, running]


OLDER_TABLE = """
CREATE TABLE jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, submission TEXT NOT NULL, environ TEXT NOT NULL,
  state TEXT NOT NULL DEFAULT 'waiting', wish TEXT NOT NULL DEFAULT '', slots TEXT NOT NULL DEFAULT '{}',
  attempt INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, submitted REAL NOT NULL,
  started REAL, ended REAL, exit_code INTEGER, why TEXT NOT NULL DEFAULT '')
"""
OLDER_ROW = {
    **{"run_id": "old", "run_dir": "/runs/old", "options": [], "command": ["x.py"], "cwd": "/", "umask": 18},
    **{"demand": {"pool": {"localhost": [0]}, "nodes": 1, "per_node": 1}, "names": {}, "priority": 0},
    **{"after": [], "time_s": None, "retries": 0, "preemptible": False, "grace_s": 3.0},
}


def older(folder: Path, *submissions: object) -> None:
    """Write rows as zlaunch 0.2.0 does."""
    with closing(sqlite3.connect(folder / "jobs.sqlite")) as base, base:
        base.execute(OLDER_TABLE.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
        for content in submissions:
            values = (json.dumps(content), "{}", 1.0)
            base.execute("INSERT INTO jobs (submission, environ, submitted) VALUES (?, ?, ?)", values)


def test_rows_of_an_older_zlaunch_are_read(tmp_path: Path) -> None:
    older(tmp_path, OLDER_ROW)
    store = Store(tmp_path)
    older(tmp_path, {**OLDER_ROW, "run_dir": "/runs/later"})  # it is still in use beside this one
    for name in ("old", "later"):
        job = Store(tmp_path).of_run(Path("/runs", name))
        assert isinstance(job, QueuedJob)
        assert (job.submission.command, job.submission.starter, job.version) == (
            ("x.py",),
            (),
            "0.2.0 or older",
        )
    assert len(store.jobs("waiting")) == 2


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE jobs SET schema = 3, version = '9.9', submission = '{\"new\": 1}'", "format is 3"),
        ("UPDATE jobs SET submission = '{\"run_'", "damaged"),
        ("UPDATE jobs SET submission = '[1]'", "damaged"),
        ("UPDATE jobs SET submission = json_set(submission, '$.command', 7)", "command"),
        ("UPDATE jobs SET submission = json_set(submission, '$.demand', 7)", "damaged"),
        ("UPDATE jobs SET submission = json_set(submission, '$.later_option', 7)", "later_option"),
        ("UPDATE jobs SET submission = json_set(submission, '$.settings', json('{}'))", "damaged"),
        ('UPDATE jobs SET slots = \'{"localhost": ["x"]}\'', "damaged"),
        ("UPDATE jobs SET failures = 'many'", "damaged"),
    ],
)
def test_a_row_that_cannot_be_read_is_shown_and_removed_and_hides_no_other(
    tmp_path: Path, damage: str, problem: str
) -> None:
    before = Store(tmp_path)
    bad, good = before.add(submission(), {}), before.add(submission(1), {})
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as base, base:
        base.execute(f"{damage} WHERE id = {bad}")
    store = Store(tmp_path)
    assert [job.id for job in store.jobs("waiting")] == [good]
    unreadable, _ = store.rows("waiting")
    assert isinstance(unreadable, UnreadableJob)
    assert (unreadable.id, unreadable.run_id, unreadable.run_dir) == (bad, "run0", "/runs/0")
    assert problem in unreadable.text and ("9.9" if "9.9" in damage else __version__) in unreadable.text
    assert store.of_run(Path("/runs/0")) == unreadable
    assert store.end(unreadable, End(143, "stopped"), "cancelled")
    assert [job.id for job in store.rows("waiting")] == [good]


def test_the_file_of_a_newer_zlaunch_is_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path)
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as base, base:
        base.execute("PRAGMA user_version = 99")
    with pytest.raises(LaunchError, match="newer zlaunch"):
        Store(tmp_path)


def test_a_job_that_has_ended_leaves_no_secret(tmp_path: Path) -> None:
    token = "hf_abcdefghijklmnopqrstuvwx"
    store = Store(tmp_path)
    given = submission(
        command=("train.py", "--api_key", "hunter2hunter2", f"--url=x?{token}", "--lr=0.1", "s3cretvalue1"),
        options=("--env=WANDB_API_KEY=0123456789abcdef",),
    )
    job_id = store.add(given, {"MY_PASSWORD": "s3cretvalue1"})
    end(store, job_id)
    job = store.find(job_id)
    assert isinstance(job, QueuedJob)
    assert job.submission.command[:2] == ("train.py", "--api_key") and "--lr=0.1" in job.submission.command
    data = (tmp_path / "jobs.sqlite").read_bytes()
    for secret in ("hunter2hunter2", token, "0123456789abcdef", "s3cretvalue1"):
        assert secret.encode() not in data, secret


def test_the_settings_of_the_submitter_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    given = submission(
        settings=ProcessSettings.of_this_process(), starter=("/x/python", "-m", "zlaunch.cli.queued")
    )
    job = Store(tmp_path).find(store.add(given, {}))
    assert isinstance(job, QueuedJob) and job.submission == given and job.version == __version__


@pytest.mark.parametrize("name", ["plain", "ünï", "with 'quote\" and \\", "\udcff"])
def test_the_jobs_of_a_folder_are_found(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    folder = Path("/sweeps", name)
    inside = store.add(submission(run_dir=str(folder / "1")), {})
    store.add(submission(1, run_dir=f"{folder}2/1"), {})
    store.add(submission(2, run_dir=str(folder)), {})
    end(store, inside)
    assert store.states_under(folder) == {str(folder / "1"): ("ended", 0)}
    assert (job := store.of_run(folder / "1")) is not None and job.id == inside


def test_ended_jobs_are_read_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlaunch.queue.store._PAGE", 2)
    store = Store(tmp_path)
    for number in range(5):
        end(store, store.add(submission(number), {}))
    assert [[job.id for job in page] for page in store.ended_pages()] == [[5, 4], [3, 2], [1]]


def test_a_look_at_jobs_that_wait_parses_no_submission_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon looks whenever anything changes: with 1,000 jobs that would be its whole work."""
    store = Store(tmp_path)
    for number in range(20):
        store.add(submission(number), {})
    parsed: list[int] = []
    read = module._read_submission

    def noted(row: sqlite3.Row, text: object) -> Submission:
        parsed.append(row["id"])
        return read(row, text)

    monkeypatch.setattr(module, "_read_submission", noted)
    for _ in range(3):
        assert len(store.jobs("waiting")) == 20
    assert len(parsed) == 20


def test_a_look_at_jobs_that_have_not_changed_reads_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the environment in front of what changes: an index answers instead."""
    store = Store(tmp_path)
    for number in range(3):
        store.add(submission(number, run_dir=str(tmp_path / f"{number}")), {})
    store.jobs("waiting")
    asked: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **more: Any) -> sqlite3.Connection:
        base = connect(*arguments, **more)
        base.set_trace_callback(asked.append)
        return base

    monkeypatch.setattr(sqlite3, "connect", traced)
    assert len(store.jobs("waiting")) == len(store.states_under(tmp_path)) == 3
    questions = [text for text in asked if text.startswith("SELECT")]
    assert len(questions) == 2
    with closing(connect(tmp_path / "jobs.sqlite")) as base:
        for text in questions:
            plan = str(base.execute(f"EXPLAIN QUERY PLAN {text}").fetchall())
            assert "USING COVERING INDEX" in plan, plan


def test_a_job_that_another_process_has_started_again_is_read_again(tmp_path: Path) -> None:
    """A daemon that was killed between its note and the start: the attempt has the same number."""
    store = Store(tmp_path)
    other = Store(tmp_path)
    store.start(store.add(submission(), {}), {"localhost": (0,)})
    [job] = store.jobs("running")
    other.wait_again(job, "", attempt=job.attempt, failures=0)
    other.start(job.id, {"localhost": (1,)})
    [job] = store.jobs("running")
    assert job.slots == {"localhost": (1,)}


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_text("something else, and long enough to be read as a header of a file")
    with pytest.raises(LaunchError, match=r"jobs\.sqlite"):
        Store(tmp_path)
