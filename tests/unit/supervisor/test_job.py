"""Test when a run gets another attempt and on which hosts, with attempts whose outcomes the test gives."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.errors import LaunchError, NodeError
from zlaunch.plan.options import Launch, Program
from zlaunch.plan.plan import NodePlan, Plan, WorkerPlan
from zlaunch.supervisor import checkups, run_folder
from zlaunch.supervisor import job as module
from zlaunch.supervisor.end import End
from zlaunch.supervisor.job import Job, run_job
from zlaunch.supervisor.nodes import LostNodeProcesses, Node, Rendezvous, Say
from zlaunch.supervisor.verdict import Outcome
from zlaunch.system import boot_clock
from zlaunch.view.console import Console

FAILED = Outcome(7)
Attempt = tuple[int, tuple[str, ...]]


def lost(*hosts: str, died: Sequence[str] = ()) -> Outcome:
    return Outcome(1, lost=frozenset(hosts), died=frozenset(died))


class FakeJob(Job):
    """A job of hosts whose agents answer at once, but for those that are down."""

    def __init__(self, folder: Path, hosts: Sequence[str], **options: Any) -> None:
        self.launch = Launch(
            program=Program("script", "x"),
            run_id="id",
            run_dir=str(folder),
            workdir="/",
            **options,
        )
        self._hosts = tuple(hosts)
        self.down: set[str] = set()
        self.connected: list[str] = []
        self.ended: list[str] = []
        self.swept: list[tuple[Sequence[str], str]] = []
        self.clean: frozenset[str] = frozenset()
        """Hosts that say, when they are swept, that nothing is left."""
        self.met: list[Rendezvous | None] = []

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._hosts

    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        nodes = [self.node(host) for host in hosts if host not in self.down]
        self.connected += [node.host for node in nodes]
        return nodes, [NodeError(host, "is down") for host in hosts if host in self.down]

    def node(self, host: str) -> Node:
        link: Any = SimpleNamespace(host=host, end=lambda: self.ended.append(host), send=lambda command: None)
        facts: Any = None
        return Node(link, facts)

    def gpus_of(self, node: Node) -> Sequence[str]:
        return ()

    def plan(self, nodes: Sequence[Node], rendezvous: Rendezvous | None, attempt: int) -> Plan:
        self.met.append(rendezvous)
        worker = WorkerPlan(0, 0, {}, ("x",))
        made = tuple(NodePlan(node.host, (worker,)) for node in nodes)
        return Plan("id", self.launch.run_dir, "", 1, made, cwd="/", grace_s=0.0)

    def kill_leftovers(self, lost: Mapping[str, LostNodeProcesses], run_id: str) -> frozenset[str]:
        self.swept.append((list(lost), run_id))
        return self.clean


class Scene:
    """A job, and what its attempts come to. An attempt whose outcome is a function calls it first."""

    def __init__(self, folder: Path, *hosts: str, **options: Any) -> None:
        self.job = FakeJob(folder, hosts or ("a",), **options)
        self.outcomes: Iterator[Outcome | Callable[[], Outcome]] = iter(())
        self.attempts: list[Attempt] = []
        self.plans: list[Plan] = []
        self.save_asked: list[bool] = []
        self.err = io.BytesIO()
        self.stay: Callable[[Sequence[str], Outcome], Sequence[str]] = lambda hosts, outcome: [
            host for host in hosts if host not in outcome.lost
        ]

    def controller(self, plan: Plan, console: Console, links: Sequence[Any], **more: Any) -> Any:
        """What stands for a controller: it knows how the attempt ends."""
        hosts = tuple(link.host for link in links)
        self.attempts.append((more["attempt"], hosts))
        self.save_asked.append(more["save_asked"]())
        self.plans.append(plan)
        made = SimpleNamespace(links=links, waiting=set())

        def run() -> Outcome:
            run_folder.started(plan, more["attempt"])
            given = next(self.outcomes)
            outcome = given if isinstance(given, Outcome) else given()
            stay = self.stay(hosts, outcome)
            made.waiting = {index for index, host in enumerate(hosts) if host in stay}
            return outcome

        made.run = run
        return made

    def run(self, *outcomes: Outcome | Callable[[], Outcome], **options: Any) -> Outcome:
        self.outcomes = iter(outcomes)
        console = Console([0], out=io.BytesIO(), err=self.err, terminal=False)
        self.job.launch = replace(self.job.launch, **options)
        outcome = run_job(self.job, console)
        assert next(self.outcomes, None) is None, "there were fewer attempts"
        return outcome

    def said(self) -> str:
        return self.err.getvalue().decode()

    def recorded(self) -> int | None:
        end = self.end()
        return None if end is None else end.code

    def end(self) -> End | None:
        record = run_folder.read(self.job.launch.run_dir)
        return None if record is None else record.end


MakeScene = Callable[..., Scene]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeScene:
    def make(*hosts: str, **options: Any) -> Scene:
        made = Scene(tmp_path, *hosts, **options)
        monkeypatch.setattr(module, "Controller", made.controller)
        monkeypatch.setattr(module, "find_rendezvous", lambda nodes, **_: Rendezvous("addr", 5, ()))
        return made

    return make


class Slept(list[float]):
    """The seconds that were slept, of a clock that jumps over them; `act` is called for each."""

    act: Callable[[float], None]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Slept:
    made, real = Slept(), boot_clock.now_s
    made.act = made.append
    jumped = 0.0

    def sleep(seconds: float) -> None:
        nonlocal jumped
        jumped += seconds
        made.act(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(boot_clock, "now_s", lambda: real() + jumped)
    return made


def test_a_run_that_ends_well_has_one_attempt_and_leaves_no_agent(scene: MakeScene) -> None:
    one = scene("a", "b")
    assert one.run(Outcome(0), max_restarts=3) == Outcome(0)
    assert one.attempts == [(0, ("a", "b"))] and one.recorded() == 0
    assert sorted(one.job.ended) == ["a", "b"] and one.job.met == [Rendezvous("addr", 5, ())]


def test_one_node_has_no_rendezvous(scene: MakeScene) -> None:
    one = scene("a")
    one.run(Outcome(0))
    assert one.job.met == [None]


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_failure_is_tried_again_as_often_as_the_limit_says(scene: MakeScene, restarts: int) -> None:
    one = scene()
    assert one.run(*[FAILED] * (restarts + 1), max_restarts=restarts) == FAILED
    assert [number for number, _ in one.attempts] == list(range(restarts + 1))
    assert one.said().count("zlaunch: restart") == restarts and one.recorded() == 7
    assert one.job.connected == ["a"], "agents that wait are used again"


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(143, signum=signal.SIGTERM),
        Outcome(75, save_asked=True),
    ],
)
def test_what_was_stopped_or_has_saved_is_not_tried_again(scene: MakeScene, outcome: Outcome) -> None:
    assert scene().run(outcome, max_restarts=3) == outcome


def test_the_first_attempt_has_the_number_that_a_queue_gives_it(scene: MakeScene) -> None:
    one = scene()
    one.run(FAILED, Outcome(0), max_restarts=1, first_attempt=4)
    assert [number for number, _ in one.attempts] == [4, 5]


def test_agents_keep_what_a_restart_needs_only_where_there_may_be_one(scene: MakeScene) -> None:
    for limits, keeps in (({}, False), ({"max_restarts": 1}, True), ({"min_nodes": 1}, True)):
        one = scene("a", "b")
        one.run(Outcome(0), **limits)
        assert [plan.restarts for plan in one.plans] == [keeps], limits


def test_a_port_that_was_taken_costs_no_restart_but_once(scene: MakeScene) -> None:
    taken = Outcome(1, port_taken=True)
    one = scene("a", "b")
    assert one.run(taken, Outcome(0)) == Outcome(0) and "rendezvous port was taken" in one.said()
    assert scene("a", "b").run(taken, taken) == taken
    assert scene("a", "b", master_port=99).run(taken) == taken, "another port is not what was asked for"


def test_a_spare_takes_a_lost_node_s_place_at_no_restart(scene: MakeScene) -> None:
    one = scene("a", "b", "s")
    assert one.run(lost("a", died=["a"]), Outcome(0), spares=1) == Outcome(0)
    assert one.attempts == [(0, ("a", "b")), (1, ("s", "b"))]
    assert one.job.connected == ["a", "b", "s"], "b's agent has waited"
    assert one.job.swept == [(["a"], "id")] and "s takes the place of a" in one.said()


def test_a_lost_node_without_a_spare_is_a_failure_that_uses_a_restart(scene: MakeScene) -> None:
    one = scene("a", "b")
    assert one.run(lost("a"), lost("a"), max_restarts=1) == lost("a")
    assert one.attempts == [(0, ("a", "b")), (1, ("a", "b"))]
    assert one.job.connected == ["a", "b", "a"] and one.job.swept == []


def test_a_run_shrinks_to_as_many_nodes_as_it_needs(scene: MakeScene) -> None:
    one = scene("a", "b", "c")
    assert one.run(lost("b"), lost("a"), min_nodes=2) == lost("a")
    assert one.attempts == [(0, ("a", "b", "c")), (1, ("a", "c"))]
    assert "going on with 2 of 3 nodes, without b" in one.said()


def test_nodes_that_are_down_at_the_start_are_replaced_or_end_it(scene: MakeScene) -> None:
    one = scene("a", "b", "s")
    one.job.down = {"b"}
    assert one.run(Outcome(0), spares=1) == Outcome(0)
    assert one.attempts == [(0, ("a", "s"))] and "b: is down" in one.said()
    two = scene("a", "b")
    two.job.down = {"b"}
    outcome = two.run()
    assert (outcome.code, two.attempts) == (2, [])
    assert outcome.end == End(2, "host refused", ("b",))
    assert "1 of 2 nodes cannot take part; nothing was started" in two.said() and two.job.ended == ["a"]


def test_hosts_that_do_not_answer_use_restarts_with_growing_pauses(scene: MakeScene, slept: Slept) -> None:
    one = scene("a", "b")
    one.job.down = {"b"}

    def wait(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            one.job.down = set()  # it has booted

    slept.act = wait
    assert one.run(FAILED, Outcome(0), max_restarts=4) == Outcome(0)
    assert slept == [5.0, 10.0, 20.0] and one.said().count("b: is down") == 3
    assert "restart 3 of 4 in 20 s" in one.said() and "restart 4 of 4\n" in one.said()
    assert one.attempts == [(0, ("a", "b")), (1, ("a", "b"))], "what was not started is no attempt"
    assert one.job.connected == ["a", "b"] and one.end() == End(0, "finished")


@pytest.mark.parametrize(("slots", "end"), [
    ((), End(2, "host refused", ("a",))),
    ((4, 6), End(2, "host refused", slots=(("a", 4), ("a", 6)))),
])  # fmt: skip
def test_a_plan_that_a_node_cannot_carry_out_is_a_refusal(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch, slept: Slept, slots: tuple[int, ...], end: End
) -> None:
    one = scene("a")

    def plan(*_: Any) -> Plan:
        raise NodeError("a", "has no such GPU", slots)

    monkeypatch.setattr(one.job, "plan", plan)
    assert one.run(max_restarts=1).end == end
    assert one.said().count("a: has no such GPU") == 2 and slept == [5.0]


def test_what_no_other_host_cures_is_refused_at_once(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene("a")
    run_folder.begun(one.job.launch.run_dir, "id", ["a"], 1)

    def plan(*_: Any) -> Plan:
        raise LaunchError("--include: there is no such slot")

    monkeypatch.setattr(one.job, "plan", plan)
    with pytest.raises(LaunchError):
        one.run(max_restarts=3)
    assert one.end() == End(2, "refused")


# -- leases


def left(seconds: float, *hosts: str) -> dict[str, LostNodeProcesses]:
    return {host: LostNodeProcesses(boot_clock.now_s() + seconds) for host in hosts}


def test_the_next_attempt_waits_until_a_lost_node_runs_nothing(scene: MakeScene, slept: Slept) -> None:
    one = scene("a", "b", "s")
    outcome = Outcome(1, lost=frozenset(["a"]), died=frozenset(["a"]), left=left(9.0, "a"))
    assert one.run(outcome, Outcome(0), spares=1) == Outcome(0)
    assert 8.0 < sum(slept) < 9.5
    assert "waiting 9 s: until then, workers on a may still run" in one.said()


def test_the_end_of_a_run_waits_as_well_as_a_queue_starts_the_next_one(
    scene: MakeScene, slept: Slept
) -> None:
    one = scene("a", "b")
    assert one.run(Outcome(1, lost=frozenset(["a"]), left=left(1.0, "a"))).code == 1
    assert 0.5 < sum(slept) < 1.5 and "waiting" not in one.said(), "a moment is not worth a word"
    slept.clear()
    assert one.run(Outcome(143, signum=15, lost=frozenset(["a"]), left=left(30.0, "a"))).signum == 15
    assert slept == [], "whoever stops a run starts no other"


def test_a_node_that_says_that_nothing_is_left_is_not_waited_for(scene: MakeScene, slept: Slept) -> None:
    one = scene("a", "b", "s")
    one.job.clean = frozenset(["a"])
    outcome = Outcome(1, lost=frozenset(["a"]), died=frozenset(["a"]), left=left(9.0, "a"))
    assert one.run(outcome, Outcome(0), spares=1) == Outcome(0) and slept == []


def test_nodes_that_are_back_begin_an_attempt_without_a_restart(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[str, ...]] = []

    class Found:
        def __init__(self, connect: Any, hosts: Sequence[str]) -> None:
            looked.append(tuple(hosts))
            self.found_hosts = list(hosts)

        def found(self) -> list[str]:
            return self.found_hosts

        def end(self) -> None:
            return

    monkeypatch.setattr(module, "HostReturnWatcher", Found)
    one = scene("a", "b")
    assert one.run(lost("a"), Outcome(1, regroups=True), Outcome(0), min_nodes=1) == Outcome(0)
    assert one.attempts == [(0, ("a", "b")), (1, ("b",)), (2, ("a", "b"))]
    assert looked == [(), ("a",), ()] and "going on with 2 of 2 nodes" in one.said()


def test_a_signal_while_nodes_are_connected_to_ends_the_run(scene: MakeScene) -> None:
    """No controller is there that would handle it; a request for stacks or a save finds nothing yet."""
    one = scene("a")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)}

    def connect(hosts: Sequence[str], say: Say) -> Any:
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), signum)
        raise AssertionError("the run went on")

    one.job.connect = connect  # type: ignore[method-assign]
    outcome = one.run()
    assert (outcome.code, outcome.signum) == (143, signal.SIGTERM) and "stopped by SIGTERM" in one.said()
    assert before == {signum: signal.getsignal(signum) for signum in before}


def test_a_second_signal_does_not_end_the_report_of_the_first(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene("a")

    def connect(hosts: Sequence[str], say: Say) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)

    def name(signum: int) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "SIGTERM"

    monkeypatch.setattr(module, "signal_name", name)
    one.job.connect = connect  # type: ignore[method-assign]
    assert one.run() == Outcome(143, signum=signal.SIGTERM)


def test_a_signal_after_the_last_attempt_changes_nothing(
    scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_folder.ended

    def signalled(run_dir: str, end: End) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ended(run_dir, end)

    monkeypatch.setattr(run_folder, "ended", signalled)
    one = scene("a")
    assert one.run(Outcome(0)) == Outcome(0) and one.recorded() == 0


def test_an_error_of_our_own_ends_the_run_with_a_record_and_without_agents(scene: MakeScene) -> None:
    one = scene("a", "b")

    def fail() -> Outcome:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        one.run(fail, max_restarts=3)
    assert one.recorded() == 1 and sorted(one.job.ended) == ["a", "b"]


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hosts that are not healthy."""
    hosts: set[str] = set()

    def find(nodes: Sequence[Node], *_about: Any) -> list[NodeError]:
        return [NodeError(node.host, "it is not healthy: hot") for node in nodes if node.host in hosts]

    monkeypatch.setattr(checkups, "find_unhealthy", find)
    return hosts


def test_an_unhealthy_node_ends_the_run_before_a_worker_starts(scene: MakeScene, sick: set[str]) -> None:
    sick.add("b")
    one = scene("a", "b", "s")
    outcome = one.run(health=True, spares=1, min_nodes=1)
    assert outcome.end == End(2, "host refused", ("b",)) and one.attempts == []
    assert "b: it is not healthy: hot" in one.said() and "--exclude_unhealthy continues" in one.said()
    assert sorted(one.job.ended) == ["a", "b"]


def test_nobody_asks_for_the_health_without_the_option(scene: MakeScene, sick: set[str]) -> None:
    sick.add("a")
    assert scene("a").run(Outcome(0)) == Outcome(0)


def test_unhealthy_nodes_are_left_out_as_dead_ones_are(scene: MakeScene, sick: set[str]) -> None:
    health = {"health": True, "exclude_unhealthy": True}
    sick.update(("b", "s"))
    one = scene("a", "b", "c", "s")
    assert one.run(FAILED, Outcome(0), spares=1, min_nodes=2, max_restarts=1, **health) == Outcome(0)
    assert one.attempts == [(0, ("a", "c")), (1, ("a", "c"))]
    assert "s takes the place of b" in one.said() and "without s" in one.said()
    assert one.job.ended.count("b") == 1 and one.job.connected.count("b") == 1, "it is not taken back"
    two = scene("a", "b")
    outcome = two.run(min_nodes=2, **health)
    assert outcome.end == End(2, "host refused", ("b",)) and two.attempts == []


def test_there_is_no_restart_while_too_few_nodes_are_healthy(
    scene: MakeScene, sick: set[str], slept: Slept
) -> None:
    sick.update(("a", "b"))
    one = scene("a", "b")
    outcome = one.run(min_nodes=1, max_restarts=3, health=True, exclude_unhealthy=True)
    assert outcome.end == End(2, "host refused", ("a", "b")) and one.attempts == []
    assert one.job.connected == ["a", "b"] and slept == []
    assert "no restart: the run needs 1 of 2 hosts, and uses no unhealthy one" in one.said()


def test_a_dead_node_beside_an_unhealthy_one_may_come_back(
    scene: MakeScene, sick: set[str], slept: Slept
) -> None:
    sick.add("a")
    one = scene("a", "b")
    one.job.down.add("b")
    slept.act = lambda seconds: one.job.down.clear()
    health = {"health": True, "exclude_unhealthy": True}
    assert one.run(Outcome(0), min_nodes=1, max_restarts=1, **health) == Outcome(0)
    assert one.attempts == [(0, ("b",))]


def test_a_node_that_gets_sick_is_left_out_of_the_next_attempt(scene: MakeScene, sick: set[str]) -> None:
    def gets_sick() -> Outcome:
        sick.add("b")
        return FAILED

    one = scene("a", "b")
    health = {"health": True, "exclude_unhealthy": True}
    assert one.run(gets_sick, Outcome(0), min_nodes=1, max_restarts=1, **health) == Outcome(0)
    assert one.attempts == [(0, ("a", "b")), (1, ("a",))]


def test_a_save_that_is_asked_for_before_there_are_workers_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    monkeypatch.setattr(module, "Controller", scene.controller)
    connect = scene.job.connect

    def asked(hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return connect(hosts, say)

    monkeypatch.setattr(scene.job, "connect", asked)
    assert scene.run(Outcome(0)).code == 0 and scene.save_asked == [True]
