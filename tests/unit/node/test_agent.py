"""Test what an agent decides, with pipes instead of a launcher and workers that are no processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from zlaunch.node import agent as module
from zlaunch.node.agent import Agent, Due, Ending
from zlaunch.node.worker import Worker
from zlaunch.plan.plan import NodePlan, Plan, WorkerPlan
from zlaunch.system import boot_clock
from zlaunch.system.events import AgentStream, Output
from zlaunch.system.processes import Process

WORKERS = (WorkerPlan(0, 0, {}, ("x",)), WorkerPlan(1, 1, {}, ("x",)))
PLAN = Plan("id", "/run", "127.0.0.1", 1, (NodePlan("n1", WORKERS),), cwd="/", grace_s=3.0)


class Scene:
    """An agent whose workers are pipes, and what it has done to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stdin, self.commands = os.pipe()
        self.events, stdout = os.pipe()
        os.set_blocking(self.events, False)
        self.signals: list[tuple[list[int], int]] = []
        self.leftovers: list[Process] = []
        self.killed: list[tuple[Process, int]] = []
        self.ended: list[tuple[int, int]] = []
        self.pipes: dict[int, list[int]] = {}
        monkeypatch.setattr(module, "signal_groups", lambda pids, n: self.signals.append((list(pids), n)))
        monkeypatch.setattr(module, "run_processes", lambda *a, **k: self.leftovers)
        monkeypatch.setattr(module, "kill", lambda process, n: self.killed.append((process, n)))
        monkeypatch.setattr(module, "kill_leftovers", lambda *a, **k: len(self.leftovers))
        monkeypatch.setattr(module, "spawn", self.spawn)
        monkeypatch.setattr(module, "open_pidfd", lambda pid: None)
        monkeypatch.setattr(os, "waitpid", self.waitpid)
        self.agent = Agent(os.getppid(), stdin, stdout)

    def spawn(self, plan: WorkerPlan, cwd: str, user_input: int | None) -> Worker:
        pid = 10_000_000 + plan.rank  # beyond every process
        pairs = [os.pipe() for _ in range(3)]
        for reader, _ in pairs:
            os.set_blocking(reader, False)
        (out, _), (err, _), (events, _) = pairs
        self.pipes[pid] = [writer for _, writer in pairs]
        return Worker(plan, pid, {out: "stdout", err: "stderr"}, events)

    def waitpid(self, pid: int, options: int) -> tuple[int, int]:
        return self.ended.pop(0) if self.ended else (0, 0)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message, and let the agent read it."""
        os.write(self.commands, json.dumps(message).encode() + b"\n")
        self.agent._on_stdin()

    def start(self, **changes: Any) -> None:
        from dataclasses import asdict

        self.tell({**asdict(PLAN), **changes})

    def said(self) -> list[Any]:
        """Return the events since the last call."""
        try:
            return list(AgentStream().feed(os.read(self.events, 1 << 20)))
        except BlockingIOError:
            return []

    def exit(self, rank: int, status: int = 0) -> None:
        """Let a worker end, and the agent see it."""
        self.ended.append((10_000_000 + rank, status))
        self.agent._reap()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    fds = {made.commands, made.events, made.agent.uplink.stdin, made.agent.outbox.fd}
    for writers in made.pipes.values():
        fds |= set(writers)
    for worker in made.agent.workers.values():
        fds |= {*worker.streams, worker.event_fd}
    for fd in fds:
        os.close(fd)


def test_a_plan_starts_the_workers_and_only_the_first_one_counts(scene: Scene) -> None:
    scene.start()
    scene.start()
    assert [event["type"] for event in scene.said()] == ["agent", "spawn", "spawn"]
    assert [worker.plan.rank for worker in scene.agent.workers.values()] == [0, 1]


def test_output_and_events_go_up_with_the_workers_rank_and_others_are_dropped(scene: Scene) -> None:
    scene.start()
    scene.said()
    (pid, worker), *_ = scene.agent.workers.items()
    out, _, events = scene.pipes[pid]
    os.write(out, b"caf\xc3\xa9\xff")
    os.write(events, b'{"type":"metrics","rank":7}\nscribble\n{"type":"exit","returncode":0}\n')
    scene.agent._on_output(worker, next(iter(worker.streams)))
    scene.agent._on_worker_event(worker)
    output, metrics = scene.said()
    assert output == Output(0, "stdout", b"caf\xc3\xa9\xff")
    assert metrics == {"type": "script", "rank": 0, "event": {"type": "metrics", "rank": 7}}


def test_a_script_s_event_that_cannot_be_sent_is_named_once(scene: Scene) -> None:
    scene.start()
    scene.said()
    worker = scene.agent.workers[10_000_000]
    deep = b'{"type": "metrics", "values": ' + b"[" * 200 + b"]" * 200 + b"}\n"
    os.write(scene.pipes[10_000_000][2], deep + deep + b'{"type": "snapshot"}\n')
    scene.agent._on_worker_event(worker)
    notice, snapshot = scene.said()
    assert (
        notice["type"] == "notice" and "rank 0 on n1" in notice["message"] and "levels" in notice["message"]
    )
    assert snapshot["event"] == {"type": "snapshot"}


def test_a_script_s_line_without_an_end_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlaunch.system.events._LINE_LIMIT_BYTES", 1000)
    scene.start()
    scene.said()
    os.write(scene.pipes[10_000_000][2], b"x" * 2000)
    scene.agent._on_worker_event(scene.agent.workers[10_000_000])
    (notice,) = scene.said()
    assert notice["type"] == "notice" and "too long" in notice["message"]


def test_output_and_events_wait_in_the_workers_pipes_while_the_launcher_takes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.start()
    worker = scene.agent.workers[10_000_000]
    watched = scene.agent.descriptors._selector.get_map()
    fds = {*worker.streams, worker.event_fd}
    assert fds <= watched.keys()
    scene.agent.outbox.put_output(0, "stdout", b"x" * (9 << 20))
    scene.agent._hold_back_output()
    assert not fds & watched.keys()
    while scene.agent.outbox.pending:
        os.read(scene.events, 1 << 20)
        scene.agent.outbox.flush()
    scene.agent._hold_back_output()
    assert fds <= watched.keys()


def test_it_reports_an_end_and_decides_nothing(scene: Scene) -> None:
    scene.start()
    scene.said()
    scene.exit(0, status=3 << 8)
    (event,) = scene.said()
    assert (event["type"], event["rank"], event["returncode"], event["after_stop"]) == ("exit", 0, 3, False)
    assert not scene.signals and not scene.agent.ending.stopping


def test_a_stop_asks_every_living_worker_once(scene: Scene) -> None:
    scene.start()
    scene.exit(0)
    scene.said()
    scene.tell({"cmd": "stop", "grace_s": 5.0})
    scene.tell({"cmd": "stop", "grace_s": 0.0})
    assert scene.signals == [([10_000_001], signal.SIGTERM), ([10_000_001], signal.SIGCONT)]
    (event,) = scene.said()
    assert (event["type"], event["grace_s"]) == ("stopping", 5.0)
    scene.exit(1, status=signal.SIGTERM)
    assert scene.said()[0]["after_stop"] is True


@pytest.mark.parametrize("in_slurm", [True, False])
@pytest.mark.parametrize("has_plan", [True, False])
def test_a_signal_of_slurm_is_reported_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, in_slurm: bool, has_plan: bool
) -> None:
    """SLURM may have sent it to the agents alone: the launcher has to know, also before there are workers."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    if has_plan:
        scene.start()
    scene.said()
    scene.agent._on_signal(signal.SIGTERM, None)
    scene.agent._tick()
    scene.agent._tick()
    signalled = [event["signum"] for event in scene.said() if event["type"] == "signalled"]
    assert signalled == [int(signal.SIGTERM)] * in_slurm
    assert scene.agent.leaving and scene.agent.ended is not has_plan


def test_what_the_launcher_says_kill_to_is_killed_in_the_next_round(scene: Scene) -> None:
    scene.start()
    scene.tell({"cmd": "kill"})
    scene.agent._tick()
    assert scene.signals[-1] == ([10_000_000, 10_000_001], signal.SIGKILL)
    assert scene.agent.ended and scene.said()[-1]["type"] == "done"


def test_leftovers_get_one_sigterm_in_a_stop_and_none_otherwise(scene: Scene) -> None:
    scene.leftovers = [Process(5, 6)]
    scene.start()
    scene.exit(0)
    scene.exit(1)
    scene.agent._tick()
    assert not scene.killed and not scene.agent.ended
    scene.tell({"cmd": "stop", "grace_s": 9.0})
    scene.agent._await_leftovers("id")
    scene.agent._await_leftovers("id")
    assert scene.killed == [(Process(5, 6), signal.SIGTERM)]
    scene.leftovers = []
    scene.agent._await_leftovers("id")
    assert scene.agent.plan is None and not scene.agent.ended


def test_a_run_may_take_longer_than_an_agent_waits_for_a_plan(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.start(heartbeat_s=0.0)
    scene.exit(0)
    scene.exit(1)
    now = time.monotonic() + 100_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scene.agent._tick()
    assert scene.said()[-1]["type"] == "done"
    scene.agent._tick()
    assert scene.agent.plan is None and not scene.agent.ended
    later = boot_clock.now_s() + 1000.0
    monkeypatch.setattr(boot_clock, "now_s", lambda: later)
    scene.agent._tick()
    assert scene.agent.ended


def test_after_its_workers_it_takes_another_plan_until_the_launcher_hangs_up(scene: Scene) -> None:
    for _ in range(2):
        scene.start()
        scene.exit(0)
        scene.exit(1, status=signal.SIGKILL)
        scene.agent._end()
        *_, end = scene.said()
        assert (end["type"], end["stays"], scene.agent.workers) == ("done", True, {})
        for writers in scene.pipes.values():
            for fd in writers:
                os.close(fd)
        scene.pipes.clear()
    os.close(scene.commands)
    scene.commands = os.open(os.devnull, os.O_RDONLY)
    scene.agent._on_stdin()
    assert scene.agent.ended


def test_a_launcher_that_hangs_up_ends_the_run(scene: Scene) -> None:
    scene.start()
    scene.said()
    os.close(scene.commands)
    scene.commands = os.open(os.devnull, os.O_RDONLY)
    scene.agent._on_stdin()
    assert scene.said()[0]["why"] == "the launcher is gone"


def test_without_a_plan_a_hang_up_is_the_end(scene: Scene) -> None:
    os.close(scene.commands)
    scene.commands = os.open(os.devnull, os.O_RDONLY)
    scene.agent._on_stdin()
    assert scene.agent.ended and scene.said() == []


def test_the_end_of_all_workers_waits_a_moment_for_their_helpers() -> None:
    ending = Ending()
    assert ending.due(0.0, all_exited=False) is Due.NOTHING
    assert ending.wait_s(0.0, 1.0, all_exited=False) == 1.0
    assert ending.due(10.0, all_exited=True) is Due.SCAN
    assert ending.due(10.01, all_exited=True) is Due.NOTHING
    assert ending.wait_s(10.01, 1.0, all_exited=True) == pytest.approx(0.09)
    assert ending.due(10.2, all_exited=True) is Due.SCAN
    assert ending.due(10.6, all_exited=True) is Due.KILL


def test_a_stop_kills_after_the_grace_period_and_at_once_when_told() -> None:
    ending = Ending()
    ending.stop(0.0, 3.0)
    assert ending.due(2.9, all_exited=False) is Due.NOTHING
    assert ending.due(3.0, all_exited=False) is Due.KILL
    ending = Ending()
    ending.stop(0.0, 3.0)
    ending.kill(1.0)
    assert ending.due(1.0, all_exited=False) is Due.KILL


# -- the lease


class Clock:
    """The clock that leases count on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(boot_clock, "now_s", lambda: self.now)


def hello(scene: Scene) -> float:
    """The agent's first beat."""
    scene.tell({"cmd": "hello", "idle_s": 900})
    beat: float = scene.said()[0]["beat"]
    return beat


def test_the_workers_are_dead_when_the_lease_ends_whatever_grace_was_given(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    beat = hello(scene)
    scene.start(heartbeat_s=15.0, grace_s=20.0, lease=beat + 15.0)
    clock.now += 9.9
    scene.agent._tick()
    assert scene.signals == []
    clock.now += 0.2
    scene.agent._tick()
    assert [signum for _, signum in scene.signals] == [signal.SIGTERM, signal.SIGCONT]
    clock.now += 4.3
    scene.agent._tick()
    assert len(scene.signals) == 2, "they may save until shortly before the end"
    clock.now += 0.3
    scene.agent._tick()
    assert scene.signals[-1][1] == signal.SIGKILL and scene.agent.ended


def test_a_stop_that_was_asked_for_before_the_cut_ends_with_the_lease(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    beat = hello(scene)
    scene.start(heartbeat_s=15.0, lease=beat + 15.0)
    scene.tell({"cmd": "stop", "grace_s": 600.0})
    clock.now += 14.6
    scene.agent._tick()
    assert scene.signals[-1][1] == signal.SIGKILL and scene.agent.ended


def test_pings_are_answered_with_a_beat_and_extend_the_lease(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    beat = hello(scene)
    scene.start(heartbeat_s=15.0, lease=beat + 15.0)
    for _ in range(10):
        clock.now += 10.0
        scene.tell({"cmd": "ping", "lease": beat + 25.0, "pauses": 2})
        (pong,) = [event for event in scene.said() if event["type"] == "pong"]
        assert (pong["beat"], pong["pauses"]) == (clock.now, 2)
        beat = pong["beat"]
        scene.agent._tick()
    assert scene.signals == []


def test_a_plan_that_comes_after_its_lease_starts_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    beat = hello(scene)
    clock.now += 100.0
    scene.start(heartbeat_s=15.0, lease=beat + 90.0)
    scene.agent._tick()
    said = scene.said()
    assert [event["type"] for event in said] == ["agent", "stopping", "done"] and "too late" in said[1]["why"]
    assert scene.pipes == {} and scene.agent.ended
