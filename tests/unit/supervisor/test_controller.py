"""Test what the controller decides, with transports that only remember."""

from __future__ import annotations

import io
import json
import math
import os
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.limits import FOR_EVER_S
from zlaunch.errors import NodeError
from zlaunch.plan.plan import NodePlan, Plan, WorkerPlan
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.controller import Controller
from zlaunch.supervisor.end import End
from zlaunch.supervisor.nodes import AgentConnection
from zlaunch.supervisor.step_signal import StepSignal
from zlaunch.supervisor.verdict import Outcome
from zlaunch.system import boot_clock
from zlaunch.system.events import WORKER_EVENTS, Event, Output, in_envelope
from zlaunch.system.messages import Hello, HelloAnswer, Packages
from zlaunch.system.processes import Process
from zlaunch.view.console import Console


class FakeTransport:
    """An agent that says what the test has it say, and remembers what it was told."""

    local = False
    patience_s = 60.0
    """Seconds without an event after which the agent counts as dead."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.told: list[Event] = []
        self.killed = False
        self.words: queue.SimpleQueue[Event | Output | None] = queue.SimpleQueue()

    def send(self, message: Event) -> None:
        self.told.append(message)
        if message.get("cmd") == "stop":
            self.words.put({"type": "done", "host": self.host, "swept": 0, "stays": False, "time": 0.0})
            self.words.put(None)

    def events(self) -> Iterator[Event | Output]:
        while (event := self.words.get(timeout=self.patience_s)) is not None:
            yield event

    def close(self, timeout_s: float) -> int | None:
        self.words.put(None)
        return 0

    def kill(self) -> None:
        self.killed = True

    def diagnostics(self) -> str:
        return ""

    def commands(self) -> list[str]:
        """Return the commands that came after the plan."""
        return [message["cmd"] for message in self.told[1:]]


class Scene:
    """A run on two nodes of one worker each."""

    def __init__(
        self,
        folder: Path,
        heartbeat_s: float = 0.0,
        *,
        slot: int | None = None,
        terminal: bool = False,
    ) -> None:
        nodes = tuple(
            NodePlan(host, (WorkerPlan(rank, 0, {}, ("x",), slot),)) for rank, host in enumerate(("n0", "n1"))
        )
        self.plan = Plan("id", str(folder), "n0", 1, nodes, cwd="/", grace_s=0.5, heartbeat_s=heartbeat_s)
        self.agents = [FakeTransport("n0"), FakeTransport("n1")]
        self.err = io.BytesIO()
        console = Console([0], out=io.BytesIO(), err=self.err, terminal=terminal)
        self.controller = Controller(self.plan, console, [AgentConnection(agent) for agent in self.agents])

    def say(self, rank: int, *events: Event) -> None:
        """Have the agent of a rank say something, in order, before the run begins."""
        for event in events:
            by_script = event["type"] in WORKER_EVENTS
            about = {"rank": rank, "pid": 10 + rank, "host": f"n{rank}", "swept": 0, "time": 0.0}
            self.agents[rank].words.put(in_envelope(rank, event) if by_script else {**about, **event})

    def end(self, rank: int, code: int = 0, **more: Any) -> None:
        """Have a worker end, and its agent stay for the launcher's word where it failed."""
        self.say(rank, {"type": "exit", "returncode": code, "after_stop": False, "reason": "", **more})
        if not code:
            self.say(rank, {"type": "done", "stays": False})

    def run(self) -> Outcome:
        return self.controller.run()

    def shown(self) -> str:
        return self.err.getvalue().decode()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("zlaunch.supervisor.controller.adopt_orphans", lambda: None)
    return Scene(tmp_path)


def test_each_agent_gets_its_own_part_of_the_plan(scene: Scene) -> None:
    scene.end(0)
    scene.end(1)
    assert scene.run() == Outcome(0)
    for rank, agent in enumerate(scene.agents):
        (node,) = agent.told[0]["nodes"]
        assert [worker["rank"] for worker in node["workers"]] == [rank] and agent.commands() == []


@pytest.mark.parametrize("ends_by", ["agents", "both"])
def test_the_signal_of_slurm_to_agents_is_one_to_the_launcher(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """It counts once, however many agents report it, and the launcher's own copy is no second one."""
    step_signal = StepSignal()
    for module in ("nodes", "controller"):
        monkeypatch.setattr(f"zlaunch.supervisor.{module}.STEP_SIGNAL", step_signal)
    monkeypatch.setattr("zlaunch.supervisor.controller._PATIENCE_S", -1.0)
    checkpoint = {"type": "checkpoint", "tag": "step1", "folder": "ckpt", "step": 1}
    report = {"type": "signalled", "signum": int(signal.SIGTERM)}
    scene.say(0, report, checkpoint)
    scene.say(1, report)
    if ends_by == "both":
        stop = scene.agents[0].send
        copies: list[int] = []

        def send(message: Event) -> None:
            stop(message)
            if message.get("cmd") == "stop" and not copies:
                copies.append(signal.SIGTERM)
                scene.controller._on_signal(signal.SIGTERM, None)

        monkeypatch.setattr(scene.agents[0], "send", send)
    outcome = scene.run()
    assert (outcome.code, outcome.signum, outcome.saved) == (143, signal.SIGTERM, True), scene.shown()
    for agent in scene.agents:
        told = [message.get("cmd") for message in agent.told]
        assert "stop" in told and "kill" not in told


@pytest.mark.parametrize(("code", "bounded"), [(0, True), (7, False)])
def test_what_bounds_the_steps_is_said_only_after_a_clean_end(scene: Scene, code: int, bounded: bool) -> None:
    """After a failure the last lines are its cause."""
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "script_ms": 97.0, "all_ms": 100.0}
    others = {"step_ms": 0.0, "communication_ms": 0.0, "disk_ms": 0.0}
    for rank in (0, 1):
        values = {"engine_step": 12, "step": 12, **times, **others}
        scene.say(rank, {"type": "metrics", "time": 1.0, "values": values})
    scene.end(0, code=code)
    scene.end(1)
    assert scene.run().code == code
    assert ("bounds the step" in scene.shown()) is bounded


def test_a_failure_stops_the_other_nodes_and_is_the_exit_code(scene: Scene) -> None:
    scene.end(1, code=7)
    outcome = scene.run()
    assert outcome.code == 7 and "rank 1 on n1 failed first" in scene.shown()
    assert all(agent.commands() == ["stop"] for agent in scene.agents)


def test_ends_that_the_stop_has_caused_are_no_failures(scene: Scene) -> None:
    scene.end(0, code=-signal.SIGTERM, after_stop=True)
    scene.end(1, code=5)
    assert scene.run().code == 5 and "rank 0" not in scene.shown()


def test_an_agent_that_dies_without_a_word_is_a_lost_node(scene: Scene) -> None:
    scene.agents[1].words.put(None)
    outcome = scene.run()
    assert outcome.lost == outcome.died == {"n1"} and outcome.code == 1
    assert "agent on n1 died" in scene.shown() and scene.agents[0].commands() == ["stop"]


def test_a_rank_that_waits_for_a_debugger_is_named_with_what_reaches_it(scene: Scene) -> None:
    waits: Event = {"type": "debugger", "rank": 1, "address": "10.0.0.2", "port": 5678, "attached": False}
    scene.say(1, waits, {**waits, "attached": True})
    scene.end(0)
    scene.end(1)
    assert scene.run() == Outcome(0)
    first, warning, how, block, attached = scene.shown().splitlines()
    assert first == "zlaunch: rank 1 on n1 waits for a debugger at 10.0.0.2:5678"
    assert "anyone who reaches this port can run code as you" in warning and "launch.json" in how
    assert json.loads(block)["connect"] == {"host": "10.0.0.2", "port": 5678}
    assert attached == "zlaunch: a debugger is attached to rank 1"


# -- causes


def test_the_cause_of_an_end(scene: Scene) -> None:
    scene.end(0)
    scene.end(1)
    assert scene.run().end == End(0, "finished")


def test_a_signal_that_nobody_of_us_has_sent_is_a_failure(scene: Scene) -> None:
    scene.end(1, code=-signal.SIGTERM)
    assert scene.run().end == End(143, "failed")


def test_the_user_s_signal_is_a_stop(scene: Scene) -> None:
    scene.controller._on_signal(signal.SIGTERM, None)
    assert scene.run().end == End(143, "stopped")


def test_a_worker_that_cannot_be_started_is_the_host_s_refusal(scene: Scene) -> None:
    scene.say(1, {"type": "error", "message": "cannot start rank 1 on n1: no memory", "refused": True})
    scene.say(1, {"type": "stopping", "why": "a worker could not be started", "grace_s": 0.5})
    scene.say(1, {"type": "done", "stays": False})
    assert scene.run().end == End(1, "host refused", ("n1",))


BROKEN_GPU = {
    "type": "exception",
    "exception": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "traceback": "",
    "talk": "",
}


@pytest.mark.parametrize(("has_gpu", "progress", "cause"), [
    (True, [], "host refused"),
    (True, [{"type": "checkpoint", "tag": "t", "folder": "/saved", "step": 1}], "failed"),
    (False, [], "failed"),
])  # fmt: skip
def test_a_gpu_that_does_not_work_at_the_start_is_its_slot_s_refusal(
    tmp_path: Path, scene: Scene, has_gpu: bool, progress: list[Event], cause: str
) -> None:
    scene = Scene(tmp_path, slot=3 if has_gpu else None)
    scene.say(1, *progress, BROKEN_GPU)
    scene.end(1, code=1)
    end = scene.run().end
    assert (end.code, end.cause, end.hosts) == (1, cause, ())
    assert end.slots == ((("n1", 3),) if cause == "host refused" else ())


def test_every_slot_whose_gpu_does_not_work_has_refused(tmp_path: Path, scene: Scene) -> None:
    scene = Scene(tmp_path, slot=4)
    for rank in (0, 1):
        scene.say(rank, BROKEN_GPU)
        scene.end(rank, code=1)
    assert scene.run().end.slots == (("n0", 4), ("n1", 4))


def test_a_slot_whose_rank_has_only_lost_the_broken_one_has_not_refused(tmp_path: Path, scene: Scene) -> None:
    scene = Scene(tmp_path, slot=4)
    scene.say(1, BROKEN_GPU)
    scene.end(1, code=1)
    lost = {**BROKEN_GPU, "exception": "RuntimeError: Connection closed by peer", "talk": "lost"}
    scene.say(0, lost)
    scene.end(0, code=1)
    assert scene.run().end.slots == (("n1", 4),)


def test_one_agent_that_dies_is_a_failure_and_all_are_a_loss(scene: Scene) -> None:
    scene.agents[1].words.put(None)
    assert scene.run().end == End(1, "failed")


def test_a_run_whose_agents_are_all_gone_is_lost(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for agent in scene.agents:
        monkeypatch.setattr(agent, "send", agent.told.append)  # nobody is there any more
        agent.words.put(None)
    assert scene.run().end == End(1, "lost")


# -- what lost nodes may still run


def test_a_lost_node_may_run_its_workers_until_its_lease_ends(tmp_path: Path, scene: Scene) -> None:
    scene = Scene(tmp_path, heartbeat_s=40.0)
    scene.say(1, {"type": "agent", "pid": 11, "start_ticks": 5, "pid_namespace": 3})
    scene.say(1, {"type": "spawn", "local_rank": 0, "pid": 12, "start_ticks": 6})
    scene.agents[1].words.put(None)
    before = boot_clock.now_s()
    found = scene.run().left
    assert list(found) == ["n1"] and 0.0 <= found["n1"].lease_ends - before - 40.0 < FOR_EVER_S
    assert found["n1"].sessions == (Process(11, 5), Process(12, 6)) and found["n1"].pid_namespace == 3


def test_a_node_whose_workers_have_all_ended_runs_nothing(scene: Scene) -> None:
    scene.say(1, {"type": "exit", "returncode": 0, "after_stop": False, "reason": ""})
    scene.agents[1].words.put(None)
    outcome = scene.run()
    assert outcome.died == {"n1"} and outcome.left == {}


def test_the_plan_goes_out_with_a_lease(tmp_path: Path, scene: Scene) -> None:
    scene = Scene(tmp_path, heartbeat_s=40.0)
    for link in scene.controller.links:
        link.clock.hear(0.0, 100.0)  # the agent's clock is 100 s behind
    scene.end(0)
    scene.end(1)
    before = boot_clock.now_s()
    assert scene.run().code == 0
    for agent in scene.agents:
        assert 0.0 <= agent.told[0]["lease"] + 100.0 - 40.0 - before < FOR_EVER_S


def test_an_agent_that_does_not_stop_in_time_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlaunch.supervisor.controller._MARGIN_S", 0.0)
    monkeypatch.setattr(scene.agents[1], "send", scene.agents[1].told.append)  # it is deaf
    scene.end(0, code=1)
    outcome = scene.run()
    assert "n1" in outcome.lost and scene.agents[1].killed and "did not stop in time" in scene.shown()


def test_a_signal_stops_all_and_another_one_at_once_is_the_same(scene: Scene) -> None:
    scene.controller._on_signal(signal.SIGINT, None)
    scene.controller._on_signal(signal.SIGINT, None)
    assert [agent.told for agent in scene.agents] == [[{"cmd": "stop", "grace_s": 0.5}]] * 2
    outcome = scene.run()
    assert (outcome.code, outcome.signum) == (130, signal.SIGINT)


def test_asking_to_save_goes_to_every_node_and_is_remembered(scene: Scene) -> None:
    scene.controller._pass_on(signal.SIGUSR1, None)
    assert all(agent.told == [{"cmd": "signal", "signum": 10}] for agent in scene.agents)
    for rank in (0, 1):
        scene.end(rank, code=75)
        scene.say(rank, {"type": "done", "stays": False})
    outcome = scene.run()
    assert outcome.code == 75 and outcome.save_asked


UNSAVED = "SIGUSR1: nothing saves on it. Set checkpoint.on_signal or use engine.should_stop; with the Hugging"


@pytest.mark.parametrize(
    ("said", "code", "is_told"),
    [
        ([{"type": "save_asked", "acts": False}], 0, True),  # as rank 0 says at once
        ([{"type": "environment"}], 1, True),  # seen at the end: the request came before the engine
        ([{"type": "environment"}], 0, False),
        ([{"type": "environment"}, {"type": "save_asked", "acts": True}], 1, False),
        ([{"type": "environment"}, {"type": "checkpoint", "tag": "a", "folder": "b"}], 1, False),
        ([], 1, False),  # no engine, so nothing is known of the script
    ],
)
def test_a_request_to_save_leaves_a_line_and_one_more_if_nothing_saves(
    scene: Scene, said: list[Event], code: int, is_told: bool
) -> None:
    scene.controller._pass_on(signal.SIGUSR1, None)
    scene.say(0, *said)
    scene.end(1, code=code)
    scene.end(0, code=code)
    scene.run()
    assert scene.shown().count("SIGUSR1: asked the workers to save") == 1
    assert scene.shown().count(UNSAVED) == is_told


def test_workers_that_a_failure_stops_are_not_taken_for_asked_to_save(scene: Scene) -> None:
    """With time to save, a worker takes SIGTERM for the request."""
    scene.say(0, {"type": "environment"})
    scene.end(0, code=1)
    scene.say(0, {"type": "save_asked", "acts": False})
    scene.end(1, code=1)
    scene.run()
    assert UNSAVED not in scene.shown()


def test_a_scripts_own_code_75_is_a_failure_where_nobody_has_saved(scene: Scene) -> None:
    scene.end(0, code=75)
    scene.say(0, {"type": "done", "stays": False})
    scene.end(1)
    outcome = scene.run()
    assert outcome.code == 75 and not outcome.save_asked
    assert "rank 0 on n0 failed first" in scene.shown()


def test_agents_get_the_grace_period_and_some_more(scene: Scene) -> None:
    before = time.monotonic()
    scene.controller.plan = replace(scene.plan, grace_s=FOR_EVER_S)
    scene.controller._on_signal(signal.SIGINT, None)
    assert scene.controller.deadline > before + FOR_EVER_S
    assert scene.run().code == 130  # they answer at once


# -- what agents and scripts send


ODD: tuple[Any, ...] = (
    *(None, True, -1, 10**400, math.inf, math.nan, "\ud83d", "\x1b[2J\n", [], {}, [[]]),
    *([["a", math.inf, "b"]], {"a": 10**400}, {"\ud83d": [None]}),
)
"""Values that no reader expects."""
FIELDS = (
    *("rank", "host", "time", "stays", "beat", "pauses", "values", "printed", "tag", "folder", "step"),
    *("limits", "exception", "traceback", "talk", "what", "unfinished", "begun", "text", "returncode"),
)
NUMBERS = ("step", "steps", "loss", "lr", "mfu", "samples_per_s", "memory_gb", "engine_step", "all_ms", "x")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("kind", WORKER_EVENTS)
def test_whatever_a_script_reports_the_run_ends_as_its_workers_do(
    tmp_path: Path, scene: Scene, kind: str, terminal: bool
) -> None:
    scene = Scene(tmp_path, terminal=terminal)
    for odd in ODD:
        values: list[Event] = []
        if kind == "metrics":
            values = [{"values": {"engine_step": 1, name: odd}} for name in NUMBERS]
        for fields in ({}, *({name: odd} for name in FIELDS), *values):
            scene.say(0, {**fields, "type": kind})
    code = 3 if kind == "exception" else 0
    scene.end(0, code=code)
    scene.end(1)
    outcome = scene.run()
    assert outcome.code == code and not outcome.lost


@pytest.mark.parametrize(
    "said",
    [
        {"type": "damaged", "why": "a line is no event"},
        {"type": "exit", "rank": 1},
        Output(0, "stdout", b"x"),
        {"type": "script", "rank": 7, "event": {"type": "snapshot"}},
    ],
)
def test_a_node_that_sends_damaged_data_is_given_up(scene: Scene, said: Event | Output) -> None:
    scene.agents[1].words.put(said)
    scene.agents[1].words.put({"type": "never read"})
    outcome = scene.run()
    assert outcome.code == 1 and outcome.lost == {"n1"} and scene.agents[1].killed
    assert "n1 sends damaged data" in scene.shown() and scene.agents[0].commands() == ["stop"]


def test_damaged_data_before_the_plan_is_named() -> None:
    agent = FakeTransport("n1")
    agent.words.put({"type": "damaged", "why": "it is no header"})
    with pytest.raises(NodeError, match="it sends damaged data: it is no header"):
        AgentConnection(agent).ask(Hello(), HelloAnswer)
    assert agent.killed


def test_output_and_events_are_written_down(scene: Scene, tmp_path: Path) -> None:
    scene.agents[0].words.put(Output(0, "stdout", b"hello\n"))
    for step in (1, 1, 2):  # the Trainer saves twice at a step of stage 3
        scene.say(0, {"type": "checkpoint", "tag": "t", "folder": "/saved", "step": step})
    scene.end(0)
    scene.end(1)
    scene.run()
    assert scene.shown().count("checkpoint t is in /saved") == 2
    assert (tmp_path / "logs" / "rank_00000.log").read_bytes() == b"hello\n"
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    saved = {"type": "checkpoint", "tag": "t", "folder": "/saved", "step": 2, "rank": 0, "host": "n0"}
    assert any(saved.items() <= event.items() for event in written)
    about = {"host": "n0", "rank": 0, "pid": 10, "returncode": 0, "reason": "", "after_stop": False}
    assert {"type": "exit", **about, "time": 0.0} in written
    assert "/saved" in (tmp_path / "checkpoint.json").read_text()
    known = run_folder.read(tmp_path)
    assert known is not None and known.pid == os.getpid() and known.hosts == ("n0", "n1")


class FakeProvenance:
    """Remembers what the controller does with it."""

    pids = ()

    def __init__(self) -> None:
        self.asks: list[Any] = []
        self.taken: list[Packages] = []

    def workers_started(self, ask: Any) -> None:
        self.asks.append(ask)
        ask()

    def take_packages(self, event: Packages) -> None:
        self.taken.append(event)


def test_the_node_of_rank_0_lists_its_packages_once_all_workers_have_started(scene: Scene) -> None:
    provenance: Any = FakeProvenance()
    scene.controller.provenance = provenance
    for rank in (0, 1):
        scene.say(rank, {"type": "spawn", "local_rank": 0, "pid": 1, "start_ticks": 1})
        scene.say(rank, {"type": "packages", "lines": [f"a=={rank}"]})
        scene.end(rank)
    assert scene.run().code == 0
    assert len(provenance.asks) == 1
    assert [agent.commands().count("packages") for agent in scene.agents] == [1, 0]
    assert sorted(event.lines for event in provenance.taken) == [["a==0"], ["a==1"]]
    assert "packages" not in Path(scene.plan.run_dir, "events.jsonl").read_text()


@pytest.mark.parametrize("save_asked", [True, False])
def test_workers_that_start_after_a_save_was_asked_for_are_told(scene: Scene, save_asked: bool) -> None:
    scene.controller.save_asked_before = lambda: save_asked  # by a signal while nodes were connected to
    for rank in (0, 1):
        scene.say(rank, {"type": "spawn", "local_rank": 0, "pid": 1, "start_ticks": 1})
        scene.end(rank)
    scene.run()
    for agent in scene.agents:
        asked = [m["signum"] for m in agent.told if m.get("cmd") == "signal"]
        assert asked == [signal.SIGUSR1] * save_asked


def test_a_missing_python_is_named_without_what_srun_says_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeTransport("n0")
    said = (
        "srun: cluster configuration lacks support for cpu binding\n"
        "slurmstepd: error: execve(): /opt/nope/bin/python: No such file or directory\n"
        "srun: error: n0: task 0: Exited with exit code 2"
    )
    monkeypatch.setattr(agent, "diagnostics", lambda: said)
    agent.words.put(None)
    with pytest.raises(NodeError) as refused:
        AgentConnection(agent).ask(Hello(), HelloAnswer)
    assert refused.value.host == "n0"
    assert refused.value.text == (
        "there is no such Python: /opt/nope/bin/python (No such file or directory). --remote_python or "
        "--venv has to name one that this host has"
    )
