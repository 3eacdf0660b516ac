"""Test how jobs of the queue are ended, and what becomes of runs that only seem to wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.queue.test_store import submission
from zlaunch.cli.main import main
from zlaunch.errors import LaunchError
from zlaunch.queue import daemon as module
from zlaunch.queue.daemon import (
    CANCELLED,
    Attempt,
    cancel_job,
    end_job,
    queue_folder,
    settle,
    settle_all,
    take_lock,
)
from zlaunch.queue.schedule import Slots
from zlaunch.queue.store import Job, PendingAction, QueuedJob, State, Store, UnreadableJob
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.end import End
from zlaunch.supervisor.found_runs import FoundRun

SLOTS: Slots = {"localhost": (0,)}


class Scene:
    """A queue with a job that waits, and its run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self.path.mkdir()
        run_folder.queued(str(self.path), "run", ["localhost"], 1, ["x.py"])
        self.folder = queue_folder()
        self.store = Store(self.folder)
        self.id = self.store.add(submission(run_dir=str(self.path)), {})

    @property
    def job(self) -> QueuedJob:
        found = self.store.find(self.id)
        assert isinstance(found, QueuedJob)
        return found

    @property
    def run(self) -> FoundRun:
        record = run_folder.read(self.path)
        assert record is not None
        return FoundRun("run", self.path, record)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(module, "_looked_at", {})
    made = Scene(tmp_path)
    lock = take_lock(made.folder)  # nobody starts a daemon
    assert lock is not None
    yield made
    os.close(lock)


def test_a_job_that_waits_is_cancelled_at_once_in_its_run_too(scene: Scene) -> None:
    cancel_job(scene.store, scene.job)
    assert (scene.job.state, scene.job.exit_code, scene.job.why) == ("ended", CANCELLED, "cancelled")
    assert scene.run.state == f"ended {CANCELLED}"


@pytest.mark.parametrize("slurm", [True, False])
def test_beside_slurm_a_runs_name_means_zlaunchs_queue(
    scene: Scene, slurm: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scene.path.parent)
    Path("bin").mkdir()
    for name in ("sbatch", "scancel", "squeue"):
        Path("bin", name).write_text("#!/bin/sh\necho RUNNING\n")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:/bin")
    choice = "slurm" if slurm else "local"
    monkeypatch.setattr("zlaunch.cli.submit.choose_queue", lambda asked, **_: asked or choice)
    monkeypatch.setattr("zlaunch.cli.queue.choose_queue", lambda asked, **_: asked or choice)
    Path("train.py").touch()
    assert main(["submit", "--queue", "local", "--num_gpus", "1", "train.py"]) == 0
    said = capfd.readouterr()
    assert ("zlaunch queue --queue local, wait" if slurm else "zlaunch queue, wait") in said.err
    name = said.out.strip()
    if slurm:
        assert main(["cancel", "7", "run", name]) == 0
        assert capfd.readouterr().out == f"7: cancelled\njob {scene.id}: cancelled\njob 2: cancelled\n"
        assert main(["cancel", "--queue", "slurm", "run"]) == 2
        assert "'run' is not a SLURM job ID" in capfd.readouterr().err
    else:
        assert main(["cancel", name]) == 0
        assert capfd.readouterr().out == "job 2: cancelled\n"


def test_a_job_that_runs_is_asked_and_goes_on_until_the_daemon_ends_it(scene: Scene) -> None:
    scene.store.start(scene.id, SLOTS)
    cancel_job(scene.store, scene.job)
    assert (scene.job.state, scene.job.wish) == ("running", "cancel") and scene.run.state == "queued"
    cancel_job(scene.store, scene.job)
    assert scene.job.wish == "cancel"


@pytest.mark.parametrize("wish", ["preempt", "timeout"])
def test_a_wish_that_came_before_does_not_keep_a_job_from_being_cancelled(
    scene: Scene, wish: PendingAction
) -> None:
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
    assert end_job(scene.store, scene.folder, waiting, End(3, "failed"), "exit code 3")
    assert scene.run.shown_state == "ended 3 (failed)"
    again = end_job(scene.store, scene.folder, waiting, End(CANCELLED, "stopped"), "cancelled")
    assert not again, "it does not wait any more"
    cancel_job(scene.store, waiting)
    cancel_job(scene.store, scene.job)
    assert (scene.job.exit_code, scene.job.why, scene.run.state) == (3, "exit code 3", "ended 3")


def test_a_waiting_job_that_was_started_meanwhile_keeps_its_place_in_the_queue(scene: Scene) -> None:
    waiting = scene.job
    scene.store.start(scene.id, SLOTS)
    assert not end_job(scene.store, scene.folder, waiting, End(1, "refused"), "not started")
    assert scene.run.state == "queued" and scene.job.state == "running"


def test_a_run_that_is_in_the_queue_stays_queued(scene: Scene) -> None:
    assert settle(scene.run).state == "queued"


def test_a_run_whose_job_has_ended_is_ended_as_that(scene: Scene) -> None:
    scene.store.end(scene.job, End(5, "timed out"), "why")  # its folder could not be written
    assert settle(scene.run).shown_state == "ended 5 (timed out)"


@pytest.mark.parametrize("has_ended", [True, False])
def test_whoever_looks_settles_a_run_whose_daemon_and_launcher_were_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    monkeypatch.setattr("zlaunch.queue.daemon.run_processes", lambda run_id: [])
    monkeypatch.setattr("zlaunch.queue.daemon._SETTLING_S", 0.0)
    scene.store.start(scene.id, SLOTS)
    attempt = Attempt(scene.folder, scene.id, 0)
    lock = attempt.lock()
    assert lock is not None
    attempt.begin()
    assert settle(scene.run).state == "queued"
    if has_ended:
        attempt.end(End(7, "failed"))
    os.close(lock)
    module._looked_at.clear()
    end = End(7, "failed") if has_ended else End(137, "lost")
    assert settle(scene.run).record.end == end
    assert (scene.job.state, scene.job.end) == ("ended", end)
    [line] = (scene.folder / module.LOG).read_text().splitlines()
    assert f" job {scene.id}: " in line, "the daemon finds the job settled and writes nothing"


def test_an_attempt_that_has_not_begun_is_the_daemons_to_judge(scene: Scene) -> None:
    scene.store.start(scene.id, SLOTS)
    assert settle(scene.run).state == "queued" and scene.job.state == "running"


@pytest.mark.parametrize("look", [settle, lambda run: settle_all([run])[0]])
def test_whoever_looks_at_a_job_that_waits_starts_the_daemon(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, look: Callable[[FoundRun], FoundRun]
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(module, "has_daemon", lambda folder: False)
    monkeypatch.setattr(module, "ensure_daemon", started.append)
    assert look(scene.run).shown_state == "queued" and started == [scene.folder]

    def fail(folder: Path) -> None:
        raise LaunchError("no daemon can be started")

    monkeypatch.setattr(module, "ensure_daemon", fail)
    module._looked_at.clear()
    found = look(scene.run)
    assert found.shown_state == "queued; no daemon can be started", "nobody will start it"


def test_a_run_whose_row_cannot_be_read_is_shown_as_that_and_can_be_cancelled(scene: Scene) -> None:
    with scene.store._open() as base:
        base.execute("UPDATE jobs SET schema = 99, version = '9.9'")
    store = Store(scene.folder)
    for run in (settle(scene.run), *settle_all([scene.run])):
        assert run.state == "queued" and "written by zlaunch 9.9" in run.shown_state
    job = store.find(scene.id)
    assert isinstance(job, UnreadableJob)
    cancel_job(store, job)
    assert scene.run.state == f"ended {CANCELLED}" and not store.rows("waiting")


def test_many_runs_are_settled_with_one_question(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    rows = Store.rows

    def noted(store: Store, *states: State) -> list[Job]:
        asked.append(states)
        return rows(store, *states)

    monkeypatch.setattr(Store, "rows", noted)
    monkeypatch.setattr(Store, "of_run", None)
    assert [run.state for run in settle_all([scene.run] * 3)] == ["queued"] * 3
    assert asked == [("waiting", "running")]


@pytest.fixture
def orphan(scene: Scene, tmp_path: Path) -> FoundRun:
    """A run that is marked as queued, and unknown to the queue: its `submit` is on its way, or was killed."""
    path = tmp_path / "orphan"
    path.mkdir()
    run_folder.queued(str(path), "orphan", ["localhost"], 1, ["x.py"])
    record = run_folder.read(path)
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
    now += module._ASK_S - 1
    settle(orphan)
    assert len(asked) == 1
    now += 1
    settle(orphan)
    assert len(asked) == 2
