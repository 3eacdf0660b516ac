"""Test how jobs of the queue are ended, and what becomes of runs that only seem to wait."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.queue.test_store import submission
from zlaunch.queue import ending as module
from zlaunch.queue.ending import CANCELLED, cancel_job, end_job, settle
from zlaunch.queue.schedule import Slots
from zlaunch.queue.store import QueuedJob, Store, Wish
from zlaunch.queue.wake import queue_folder
from zlaunch.supervisor import run_record
from zlaunch.supervisor.found_runs import FoundRun

SLOTS: Slots = {"localhost": (0,)}


class Scene:
    """A queue with a job that waits, and its run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self.path.mkdir()
        run_record.queued(str(self.path), "run", ["localhost"], 1, ["x.py"])
        self.store = Store(queue_folder())
        self.id = self.store.add(submission(run_dir=str(self.path)), {})

    @property
    def job(self) -> QueuedJob:
        found = self.store.find(self.id)
        assert found is not None
        return found

    @property
    def run(self) -> FoundRun:
        record = run_record.read(self.path)
        assert record is not None
        return FoundRun("run", self.path, record)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(module, "_looked_at", {})
    return Scene(tmp_path)


def test_a_job_that_waits_is_cancelled_at_once_in_its_run_too(scene: Scene) -> None:
    cancel_job(scene.store, scene.job)
    assert (scene.job.state, scene.job.exit_code, scene.job.why) == ("ended", CANCELLED, "cancelled")
    assert scene.run.state == f"ended {CANCELLED}"


def test_a_job_that_runs_is_asked_and_goes_on_until_the_daemon_ends_it(scene: Scene) -> None:
    scene.store.start(scene.id, SLOTS)
    cancel_job(scene.store, scene.job)
    assert (scene.job.state, scene.job.wish) == ("running", "cancel") and scene.run.state == "queued"
    cancel_job(scene.store, scene.job)
    assert scene.job.wish == "cancel"


@pytest.mark.parametrize("wish", ["preempt", "timeout"])
def test_a_wish_that_came_before_does_not_keep_a_job_from_being_cancelled(scene: Scene, wish: Wish) -> None:
    scene.store.start(scene.id, SLOTS)
    scene.store.ask(scene.job, wish)
    cancel_job(scene.store, scene.job)
    assert scene.job.wish == "cancel"


def test_a_job_that_is_being_cancelled_is_not_asked_again(scene: Scene) -> None:
    scene.store.start(scene.id, SLOTS)
    scene.store.ask(scene.job, "cancelling")
    cancel_job(scene.store, scene.job)
    assert scene.job.wish == "cancelling"


def test_a_job_that_has_changed_since_it_was_read_is_cancelled_too(scene: Scene) -> None:
    waiting = scene.job
    scene.store.start(scene.id, SLOTS)  # the daemon was faster
    cancel_job(scene.store, waiting)
    assert scene.job.wish == "cancel"
    running = replace(scene.job, wish="")
    scene.store.wait_again(scene.job, "preempted", attempt=1, failures=0)
    cancel_job(scene.store, running)
    assert (scene.job.state, scene.job.exit_code) == ("ended", CANCELLED)


def test_a_job_that_has_ended_stays_as_it_ended(scene: Scene) -> None:
    waiting = scene.job
    assert end_job(scene.store, waiting, 3, "exit code 3") and scene.run.state == "ended 3"
    assert not end_job(scene.store, waiting, CANCELLED, "cancelled"), "it does not wait any more"
    cancel_job(scene.store, waiting)
    cancel_job(scene.store, scene.job)
    assert (scene.job.exit_code, scene.job.why, scene.run.state) == (3, "exit code 3", "ended 3")


def test_a_waiting_job_that_was_started_meanwhile_keeps_its_place_in_the_queue(scene: Scene) -> None:
    waiting = scene.job
    scene.store.start(scene.id, SLOTS)
    assert not end_job(scene.store, waiting, 1, "not started")
    assert scene.run.state == "queued" and scene.job.state == "running"


def test_a_run_that_is_in_the_queue_stays_queued(scene: Scene) -> None:
    assert settle(scene.run).state == "queued"


def test_a_run_whose_job_has_ended_is_ended_as_that(scene: Scene) -> None:
    scene.store.end(scene.id, "waiting", 5, "why")  # its folder could not be written
    assert settle(scene.run).state == "ended 5"


@pytest.fixture
def orphan(scene: Scene, tmp_path: Path) -> FoundRun:
    """A run that is marked as queued, and unknown to the queue: its `submit` is on its way, or was killed."""
    path = tmp_path / "orphan"
    path.mkdir()
    run_record.queued(str(path), "orphan", ["localhost"], 1, ["x.py"])
    record = run_record.read(path)
    assert record is not None
    return FoundRun("orphan", path, record)


def test_a_run_that_never_came_into_the_queue_has_failed_after_a_while(orphan: FoundRun) -> None:
    assert settle(orphan).state == "queued"
    module._looked_at.clear()
    old = replace(orphan.record, started=time.time() - module._ORPHAN_S - 1)
    assert settle(replace(orphan, record=old)).state == "ended 1"


def test_the_queue_is_not_asked_at_every_look(orphan: FoundRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` looks many times a second, and each question opens the queue's file."""
    now = time.monotonic()
    asked: list[Path] = []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Store, "of_run", lambda self, path: asked.append(path))
    settle(orphan)
    now += module._LOOK_S - 1
    settle(orphan)
    assert len(asked) == 1
    now += 1
    settle(orphan)
    assert len(asked) == 2
