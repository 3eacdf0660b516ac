"""Test what the daemon makes of its jobs' ends and limits, with attempts that this process stands for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.queue.test_store import submission
from zlaunch.queue import daemon
from zlaunch.queue.daemon import MOST_REFUSALS, Attempt, Daemon, queue_folder, take_lock
from zlaunch.queue.schedule import Demand, Slots
from zlaunch.queue.store import QueuedJob, Store, UnreadableJob
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.end import SAVED_CODE, End
from zlaunch.system import boot_clock
from zlaunch.system.processes import Process


class Scene:
    """A queue with one job, which runs."""

    def __init__(self, folder: Path, **asked: Any) -> None:
        (folder / "run").mkdir()
        run_folder.queued(str(folder / "run"), "run0", ["localhost"], 1, ["x.py"])
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
        assert isinstance(found, QueuedJob)
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
    monkeypatch.setattr(daemon, "kill", lambda process, signum: found.append((process, signum)))
    monkeypatch.setattr(daemon, "kill_leftovers", lambda run_id: 0)
    monkeypatch.setattr(daemon, "run_processes", lambda run_id: [])
    return found


@dataclass
class Clock:
    """Stands for both clocks of this machine."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    monkeypatch.setattr(boot_clock, "now_s", made)
    return made


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


def ended(scene: Scene, code: int, end: End | None = None) -> QueuedJob:
    """Let the attempt end; return the job as the daemon leaves it."""
    os.close(scene.hold())
    scene.attempt.end(end or End.of_code(code))
    return scene.look()


def begin_again(scene: Scene) -> None:
    """Start the job that waits once more."""
    assert scene.store.start(scene.id, {"localhost": (0, 1)})
    scene.attempt = Attempt(scene.folder, scene.id, scene.job.attempt)


@asks(time_s=0.0)
def test_a_time_limit_is_enforced_once_and_explains_the_end(
    scene: Scene, kills: list[tuple[Process, int]]
) -> None:
    lock = scene.hold()
    assert scene.look().wish == "" and not kills, "a launcher that has not begun cannot be signalled yet"
    scene.attempt.begin()
    for _ in range(3):
        assert scene.look().wish == "timeout"
    assert [(process.pid, signum) for process, signum in kills] == [(os.getpid(), signal.SIGTERM)]
    scene.attempt.end(End.of_code(128 + signal.SIGTERM))
    os.close(lock)
    job = scene.look()
    assert (job.state, job.exit_code, job.cause, job.why) == ("ended", 143, "timed out", "time limit of 0 s")
    record = run_folder.read(job.submission.run_dir)
    assert record is not None and record.end == End(143, "timed out")


@asks(time_s=3600.0)
def test_a_limit_that_is_not_reached_signals_nobody_whatever_the_wall_clock_says(
    scene: Scene, kills: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = scene.hold()
    scene.attempt.begin()
    day_later = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: day_later)  # somebody has set the clock
    assert scene.look().wish == "" and not kills
    later = boot_clock.now_s() + 3601
    monkeypatch.setattr(boot_clock, "now_s", lambda: later)
    assert scene.look().wish == "timeout" and len(kills) == 1
    os.close(lock)


def test_a_launcher_that_does_not_end_is_asked_again_and_killed(
    scene: Scene, kills: list[tuple[Process, int]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []
    monkeypatch.setattr(daemon, "kill_leftovers", swept.append)
    lock = scene.hold()
    scene.attempt.begin()
    scene.store.ask(scene.job, "cancel")
    sent = []
    for _ in range(30):
        scene.look()
        sent.append([signum for _, signum in kills])
        clock.now += 1
    grace = int(scene.job.submission.grace_s)
    assert sent[0] == sent[grace + 9] == [signal.SIGTERM]
    assert sent[grace + 10] == sent[grace + 19] == [signal.SIGTERM, signal.SIGCONT, signal.SIGTERM]
    assert sent[grace + 20] == [signal.SIGTERM, signal.SIGCONT, signal.SIGTERM, signal.SIGKILL]
    assert swept[0] == scene.job.submission.run_id
    os.close(lock)  # it is dead: nothing is left of it
    for _ in range(2):
        clock.now += 1
        job = scene.look()
    assert (job.state, job.cause, job.why) == ("ended", "stopped", "cancelled")


def test_a_daemon_that_follows_takes_up_a_stop(
    scene: Scene, kills: list[tuple[Process, int]], clock: Clock
) -> None:
    lock = scene.hold()
    scene.attempt.begin()
    scene.store.ask(scene.job, "cancelling")  # the daemon that asked it was killed
    scene.look()
    assert not kills
    clock.now += 1000
    scene.look()
    assert [signum for _, signum in kills] == [signal.SIGCONT, signal.SIGTERM]
    os.close(lock)


def test_a_cancelled_job_is_signalled_once_and_ends_as_cancelled(
    scene: Scene, kills: list[tuple[Process, int]]
) -> None:
    lock = scene.hold()
    scene.attempt.begin()
    assert scene.store.ask(scene.job, "cancel")
    for _ in range(3):
        assert scene.look().wish == "cancelling"
    assert [signum for _, signum in kills] == [signal.SIGTERM]
    scene.attempt.end(End.of_code(128 + signal.SIGTERM))
    os.close(lock)
    job = scene.look()
    assert (job.state, job.exit_code, job.why) == ("ended", 143, "cancelled")


@asks(retries=1)
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (0, "exit code 0"),
        (2, "refused, exit code 2"),
        (130, "stopped by SIGINT"),
        (143, "stopped by SIGTERM"),
    ],
)
def test_what_ended_well_was_refused_or_stopped_is_not_tried_again(scene: Scene, code: int, why: str) -> None:
    job = ended(scene, code)
    assert (job.state, job.exit_code, job.why) == ("ended", code, why)


@asks(retries=1)
def test_a_failure_is_tried_again_as_often_as_was_asked_for(scene: Scene) -> None:
    job = ended(scene, 9)
    assert (job.state, job.attempt, job.failures, job.slots) == ("waiting", 1, 1, {})
    begin_again(scene)
    job = ended(scene, 9)
    assert (job.state, job.exit_code, job.why) == ("ended", 9, "exit code 9")


@asks(retries=1)
@pytest.mark.parametrize("code", [143, 130, 129, 2])
def test_a_failure_is_tried_again_whatever_its_code(scene: Scene, code: int) -> None:
    """A worker that nobody of us has signalled has failed."""
    job = ended(scene, code, End(code, "failed"))
    assert (job.state, job.attempt, job.failures) == ("waiting", 1, 1)


@asks(retries=1, names={"localhost": "node1"})
def test_a_host_that_refuses_rests_and_costs_no_retry(scene: Scene, clock: Clock) -> None:
    rests = []
    for count in range(MOST_REFUSALS):
        job = ended(scene, 2, End(2, "host refused", ("node1",)))
        assert (job.state, job.failures, job.refusals) == ("waiting", 0, count + 1)
        assert "host refused: node1" in job.why
        rests.append(scene.store.backing_off()["localhost"])
        scene.daemon._start_jobs([scene.job], [])
        assert scene.job.state == "waiting", "nothing starts on a host that rests"
        clock.now += rests[-1] + 1
        assert not scene.store.backing_off()
        begin_again(scene)
    assert rests == [30, 60, 120, 240, 480, 960, *[1800] * 4]
    job = ended(scene, 2, End(2, "host refused", ("node1",)))
    assert (job.state, job.cause) == ("ended", "host refused")


@asks(retries=2)
def test_a_host_where_a_run_has_started_is_well_again(scene: Scene, clock: Clock) -> None:
    for count in (30, 60):
        ended(scene, 2, End(2, "host refused", ("localhost",)))
        assert scene.store.backing_off() == {"localhost": count}
        begin_again(scene)
    ended(scene, 1)
    assert not scene.store.backing_off()
    begin_again(scene)
    ended(scene, 2, End(2, "host refused", ("localhost",)))
    assert scene.store.backing_off() == {"localhost": 30}


@asks(retries=1, names={"localhost": "node1"})
def test_a_slot_that_refuses_rests_and_the_next_job_gets_the_others(
    scene: Scene, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    monkeypatch.setattr(daemon, "_spawn", lambda folder, job, slots, lock, environ: chosen.append(slots))
    rests = []
    for _ in range(3):
        job = ended(scene, 1, End(1, "host refused", slots=(("node1", 1),)))
        assert (job.state, job.failures, job.why) == ("waiting", 0, "host refused: node1:1")
        rests.append(scene.store.backing_off())
        clock.now += rests[-1]["localhost:1"] + 1
        begin_again(scene)
    assert rests == [{"localhost:1": seconds} for seconds in (30, 60, 120)]
    ended(scene, 1, End(1, "host refused", slots=(("node1", 1),)))
    demand = Demand({"localhost": (0, 1)}, 1, 1)
    for name in ("b", "c"):
        scene.store.add(submission(run_dir=str(tmp_path / name), after=(), demand=demand), {})
    waiting = [job for job in scene.store.jobs("waiting") if job.id != scene.id]
    scene.daemon._start_jobs(waiting, [])
    assert chosen == [{"localhost": (0,)}], "one slot is free, the other one rests"


@asks(retries=3)
def test_a_slot_where_a_run_has_started_is_well_again_and_no_other(scene: Scene, clock: Clock) -> None:
    for slot in (1, 5):
        scene.store.back_off(f"localhost:{slot}")
    scene.store.back_off("localhost")
    ended(scene, 1)  # on slots 0 and 1
    assert list(scene.store.backing_off()) == ["localhost:5"]


def test_another_job_starts_on_the_hosts_that_do_not_rest(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    monkeypatch.setattr(daemon, "_spawn", lambda folder, job, slots, lock, environ: chosen.append(slots))
    scene.store.back_off("bad")
    pool: Slots = {"bad": (0,), "good": (0,)}
    scene.store.add(submission(run_dir=str(tmp_path / "b"), after=(), demand=Demand(pool, 1, 1)), {})
    scene.daemon._start_jobs(scene.store.jobs("waiting"), [])
    assert chosen == [{"good": (0,)}]


@asks(preemptible=True)
@pytest.mark.parametrize("code", [SAVED_CODE, 128 + signal.SIGUSR1])
def test_a_job_that_has_made_room_waits_again_and_that_is_no_failure(scene: Scene, code: int) -> None:
    assert scene.store.ask(scene.job, "preempt")
    job = ended(scene, code)
    assert (job.state, job.attempt, job.failures, job.why) == ("waiting", 1, 0, "preempted")


def test_the_code_of_a_saved_run_that_nobody_asked_ends_the_job(scene: Scene) -> None:
    job = ended(scene, SAVED_CODE)
    assert (job.state, job.exit_code) == ("ended", SAVED_CODE)


def test_a_killed_launcher_keeps_its_slots_until_its_workers_are_gone(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [Process(1, 1)]
    swept: list[str] = []
    monkeypatch.setattr(daemon, "run_processes", lambda run_id: left)
    monkeypatch.setattr(daemon, "kill_leftovers", swept.append)
    os.close(scene.hold())
    scene.attempt.begin()
    for _ in range(7):
        assert scene.look().state == "running" and not swept
        clock.now += 1
    clock.now += 1
    assert scene.look().state == "running" and swept == ["run0"], "what has not ended by itself is killed"
    left.clear()
    job = scene.look()
    assert (job.state, job.exit_code, job.cause) == ("ended", 137, "lost")
    assert job.why == "its launcher was killed"


def test_a_killed_launcher_whose_workers_are_gone_frees_its_slots_at_once(scene: Scene, clock: Clock) -> None:
    os.close(scene.hold())
    scene.attempt.begin()
    assert scene.look().state == "running"
    clock.now += 1.5
    assert scene.look().state == "ended"


@asks(heartbeat_s=40.0)
def test_a_killed_launcher_of_other_hosts_keeps_its_slots_until_their_leases_have_run_out(
    scene: Scene, clock: Clock
) -> None:
    with scene.store._open() as base:
        base.execute("""UPDATE jobs SET slots = '{"elsewhere": [0]}'""")
    os.close(scene.hold())
    scene.attempt.begin()
    scene.look()
    clock.now += 40
    assert scene.look().state == "running"
    clock.now += 1
    assert scene.look().cause == "lost"


@asks(retries=1)
@pytest.mark.parametrize("has_rebooted", [True, False])
def test_an_attempt_of_another_boot_is_lost_and_one_of_another_namespace_is_not_judged_by_its_id(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch, has_rebooted: bool
) -> None:
    lock = scene.hold()
    with monkeypatch.context() as patch:
        if has_rebooted:
            patch.setattr(boot_clock, "boot_id", lambda: "another")
        else:
            patch.setattr("zlaunch.queue.daemon.pid_namespace", lambda: 1)
        scene.attempt.begin()
    assert scene.attempt.process() is None, "its process id says nothing here"
    assert scene.look().state == "running", "somebody holds its lock"
    os.close(lock)
    if not has_rebooted:  # its workers cannot be seen: they have their time
        assert scene.look().state == "running"
        clock.now += scene.job.submission.grace_s + 5
    job = scene.look()
    assert (job.state, job.attempt, job.why) == ("waiting", 1, "its launcher was killed")


def test_files_of_another_protocol_are_refused_by_name(scene: Scene) -> None:
    os.close(scene.hold())
    path = scene.folder / "attempts" / f"{scene.id}.0.ended"
    path.write_text(json.dumps({"protocol": 99, "version": "9.9", "how": "well"}))
    job = scene.look()
    assert (job.state, job.cause) == ("ended", "failed") and "zlaunch 9.9" in job.why


def test_a_launcher_that_could_not_begin_is_a_refusal(scene: Scene) -> None:
    os.close(scene.hold())
    child = subprocess.Popen(["false"])
    child.wait()
    scene.daemon._children[scene.id, 0] = child
    job = scene.look()
    assert (job.state, job.exit_code, job.cause) == ("ended", 1, "refused")
    assert "before it began" in job.why


def test_an_interpreter_that_is_gone_is_named(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    gone = str(tmp_path / "venv" / "python")
    job_id = scene.store.add(
        submission(run_dir=str(tmp_path / "b"), after=(), starter=(gone, "-m", "zlaunch.cli.queued")), {}
    )
    scene.daemon._start_jobs(scene.store.jobs("waiting"), [])
    job = scene.store.find(job_id)
    assert isinstance(job, QueuedJob) and (job.state, job.exit_code, job.cause) == ("ended", 1, "refused")
    assert gone in job.why and gone in (tmp_path / "b" / CONSOLE_LOG).read_text()


@asks(retries=3)
def test_a_job_that_cannot_be_read_harms_no_other(scene: Scene, tmp_path: Path) -> None:
    bad = scene.store.add(submission(1, run_dir=str(tmp_path / "bad"), after=()), {})
    scene.store.start(bad, {"localhost": (2,)})
    with scene.store._open() as base:
        base.execute("UPDATE jobs SET schema = 99, version = '9.9' WHERE id = ?", (bad,))
    held = Attempt(scene.folder, bad, 0).lock()
    assert held is not None
    os.close(scene.hold())
    scene.attempt.end(End(0, "finished"))
    demand = Demand({"localhost": (2,)}, 1, None)
    scene.store.add(submission(2, run_dir=str(tmp_path / "c"), after=(), demand=demand), {})
    assert scene.daemon._look()
    assert scene.job.state == "ended", "the others go on"
    assert [job.state for job in scene.store.rows("waiting", "running")] == ["running", "waiting"]
    os.close(held)
    Attempt(scene.folder, bad, 0).end(End(4, "failed"))
    scene.daemon._look_after(scene.store.rows("running")[0])
    job = scene.store.find(bad)
    assert isinstance(job, UnreadableJob) and (job.state, job.exit_code) == ("ended", 4)


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
    monkeypatch.setattr(daemon, "_REMIND_S", 0.0)
    scene.daemon._ask_for_room(scene.job)
    assert len(kills) == 2
