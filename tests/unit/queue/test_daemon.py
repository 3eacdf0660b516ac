"""Test what the daemon makes of its jobs' ends and limits, with attempts that this process stands for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.queue.test_store import submission
from zlaunch.queue import daemon as module
from zlaunch.queue.attempt import Attempt
from zlaunch.queue.daemon import Daemon
from zlaunch.queue.store import QueuedJob, Store
from zlaunch.queue.wake import queue_folder, take_lock
from zlaunch.supervisor.failure import SAVED_CODE
from zlaunch.system.processes import Process


class Scene:
    """A queue with one job, which runs."""

    def __init__(self, folder: Path, **asked: Any) -> None:
        (folder / "run").mkdir()
        self.folder = queue_folder()
        self.store = Store(self.folder)
        self.id = self.store.add(submission(run_dir=str(folder / "run"), after=(), **asked), {})
        self.store.start(self.id, {"localhost": (0, 1)})
        lock = take_lock(self.folder)
        assert lock is not None
        self.daemon = Daemon(self.folder, self.store, lock)
        self.attempt = Attempt(self.folder, self.id, 0)
        self.descriptors = [lock, self.daemon._wake]

    @property
    def job(self) -> QueuedJob:
        found = self.store.find(self.id)
        assert found is not None
        return found

    def hold(self) -> int:
        """Hold the attempt's lock, as its launcher does."""
        lock = self.attempt.lock()
        assert lock is not None
        return lock

    def look(self) -> QueuedJob:
        """Let the daemon look after the job; return the job as it stands then."""
        self.daemon._look_after(self.job)
        return self.job


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Process, int]]:
    found: list[tuple[Process, int]] = []
    monkeypatch.setattr(module, "kill", lambda process, signum: found.append((process, signum)))
    monkeypatch.setattr(module, "sweep", lambda run_id: 0)
    return found


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kills: object
) -> Iterator[Scene]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Scene(tmp_path, **getattr(request, "param", {}))
    yield made
    for fd in made.descriptors:
        os.close(fd)


def asks(**asked: Any) -> pytest.MarkDecorator:
    """Give the job these properties."""
    return pytest.mark.parametrize("scene", [asked], indirect=True)


def ended(scene: Scene, code: int) -> QueuedJob:
    """Let the attempt end; return the job as the daemon leaves it."""
    os.close(scene.hold())
    scene.attempt.end(code)
    return scene.look()


@asks(time_s=0.0)
def test_a_time_limit_is_enforced_once_and_explains_the_end(
    scene: Scene, kills: list[tuple[Process, int]]
) -> None:
    lock = scene.hold()
    assert scene.look().wish == "" and not kills, "a launcher that has not begun cannot be signalled yet"
    scene.attempt.begin()
    for _ in range(2):
        assert scene.look().wish == "timeout"
    assert [(process.pid, signum) for process, signum in kills] == [(os.getpid(), signal.SIGTERM)]
    scene.attempt.end(128 + signal.SIGTERM)
    os.close(lock)
    job = scene.look()
    assert (job.state, job.exit_code, job.why) == ("ended", 143, "time limit of 0 s")


@asks(time_s=3600.0)
def test_a_limit_that_is_not_reached_signals_nobody(scene: Scene, kills: list[Any]) -> None:
    lock = scene.hold()
    scene.attempt.begin()
    assert scene.look().wish == "" and not kills
    os.close(lock)


def test_a_cancelled_job_is_signalled_once_and_ends_as_cancelled(
    scene: Scene, kills: list[tuple[Process, int]]
) -> None:
    lock = scene.hold()
    scene.attempt.begin()
    assert scene.store.ask(scene.job, "cancel")
    for _ in range(2):
        assert scene.look().wish == "cancelling"
    assert [signum for _, signum in kills] == [signal.SIGTERM]
    scene.attempt.end(128 + signal.SIGTERM)
    os.close(lock)
    job = scene.look()
    assert (job.state, job.exit_code, job.why) == ("ended", 143, "cancelled")


@asks(retries=1)
@pytest.mark.parametrize(
    ("code", "why"),
    [(0, "exit code 0"), (2, "exit code 2"), (130, "stopped by SIGINT"), (143, "stopped by SIGTERM")],
)
def test_what_ended_well_was_refused_or_stopped_is_not_tried_again(scene: Scene, code: int, why: str) -> None:
    job = ended(scene, code)
    assert (job.state, job.exit_code, job.why) == ("ended", code, why)


@asks(retries=1)
def test_a_failure_is_tried_again_as_often_as_was_asked_for(scene: Scene) -> None:
    job = ended(scene, 9)
    assert (job.state, job.attempt, job.failures, job.slots) == ("waiting", 1, 1, {})
    assert scene.store.start(scene.id, {"localhost": (0, 1)})
    scene.attempt = Attempt(scene.folder, scene.id, 1)
    job = ended(scene, 9)
    assert (job.state, job.exit_code, job.why) == ("ended", 9, "exit code 9")


@asks(preemptible=True)
@pytest.mark.parametrize("code", [SAVED_CODE, 128 + signal.SIGUSR1])
def test_a_job_that_has_made_room_waits_again_and_that_is_no_failure(scene: Scene, code: int) -> None:
    assert scene.store.ask(scene.job, "preempt")
    job = ended(scene, code)
    assert (job.state, job.attempt, job.failures, job.why) == ("waiting", 1, 0, "preempted")


def test_the_code_of_a_saved_run_that_nobody_asked_ends_the_job(scene: Scene) -> None:
    job = ended(scene, SAVED_CODE)
    assert (job.state, job.exit_code) == ("ended", SAVED_CODE)


def test_a_killed_launcher_keeps_its_slots_until_its_agents_must_have_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(scene.hold())
    scene.attempt.begin()
    assert scene.look().state == "running"
    monkeypatch.setattr(module, "_AGENTS_S", -scene.job.submission.grace_s - 1)
    job = scene.look()
    assert (job.state, job.exit_code, job.why) == ("ended", 137, "its launcher was killed")


def test_an_attempt_that_no_daemon_came_to_start_waits_again_with_its_number(scene: Scene) -> None:
    job = scene.look()
    assert (job.state, job.attempt, job.failures) == ("waiting", 0, 0)


def test_a_run_is_asked_to_make_room_again_and_again_but_not_at_once(
    scene: Scene, kills: list[tuple[Process, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.daemon._ask_for_room(scene.job)
    assert not kills, "it has not begun"
    os.close(scene.hold())
    scene.attempt.begin()
    for _ in range(2):
        scene.daemon._ask_for_room(scene.job)
    assert [signum for _, signum in kills] == [signal.SIGUSR1]
    monkeypatch.setattr(module, "_REMIND_S", 0.0)
    scene.daemon._ask_for_room(scene.job)
    assert len(kills) == 2
