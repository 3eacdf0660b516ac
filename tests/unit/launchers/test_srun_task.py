"""Test the part of a step's plan that each of its tasks makes by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from zlaunch.errors import LaunchError
from zlaunch.launchers.base import Launcher
from zlaunch.launchers.slurm import SrunTaskLauncher
from zlaunch.launchers.this_node import LocalLauncher
from zlaunch.plan.options import Launch, Program
from zlaunch.plan.plan import Plan
from zlaunch.slurm.environment import AllocatedNode, Allocation
from zlaunch.supervisor.verdict import Outcome
from zlaunch.system.machine import Devices

OPTIONS = Launch(
    program=Program("script", "train.py"),
    run_id="id",
    run_dir="/runs/id",
    workdir="/work",
)
UNEQUAL = (
    AllocatedNode("a", tasks=1, gpus=4),
    AllocatedNode("b", tasks=1, gpus=1),
    AllocatedNode("c", tasks=1, gpus=2),
)
GPUS = Allocation("7", UNEQUAL, True, step_id=3, procid=1, ntasks=3, localid=0, nodeid=1)
TASKS = Allocation(
    "7",
    (AllocatedNode("a", tasks=3), AllocatedNode("b", tasks=2)),
    True,
    step_id=3,
    procid=4,
    ntasks=5,
    localid=1,
    nodeid=1,
)


def plan_of(
    monkeypatch: pytest.MonkeyPatch,
    allocation: Allocation,
    tokens: Sequence[str] = (),
    cores: int = 8,
    attempt: int = 0,
    **options: Any,
) -> Plan:
    """The plan of a task that sees these GPUs and cores."""
    for name in [name for name in os.environ if name.startswith("SLURM") or name == "OMP_NUM_THREADS"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("zlaunch.system.machine.discover", lambda environ: Devices(tuple(tokens), None))
    monkeypatch.setattr("zlaunch.system.cores.usable_cores", lambda: tuple((cpu,) for cpu in range(cores)))
    return SrunTaskLauncher(replace(OPTIONS, **options), allocation).own_plan(attempt)


def places(plan: Plan) -> list[tuple[str, ...]]:
    """What the workers are told of their places."""
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return [tuple(worker.env[key] for key in keys) for node in plan.nodes for worker in node.workers]


def test_a_requeued_job_keeps_the_logs_of_its_former_start() -> None:
    folders = [
        SrunTaskLauncher.default_run_dir("x", replace(GPUS, restart_count=restarts)) for restarts in (0, 2)
    ]
    assert folders[0].name == folders[1].name
    assert folders[1].parent.name == f"{folders[0].parent.name}-restart_2"


def test_one_task_a_node_and_nodes_with_different_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for index, node in enumerate(UNEQUAL):
        allocation = replace(GPUS, procid=index, nodeid=index)
        plan = plan_of(monkeypatch, allocation, tokens=[str(gpu) for gpu in range(node.gpus or 0)])
        assert [each.host for each in plan.nodes] == [node.host]
        assert (plan.master_addr, plan.in_step) == ("a", True)
        found += places(plan)
    assert found == [
        *[(str(rank), str(rank), "7", "4", "0", "3") for rank in range(4)],
        ("4", "0", "7", "1", "1", "3"),
        ("5", "0", "7", "2", "2", "3"),
        ("6", "1", "7", "2", "2", "3"),
    ]


def test_several_tasks_a_node_and_nodes_with_different_numbers_of_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is one worker; threads and memory are shared with the other tasks of its own node alone."""
    found, threads = [], []
    for procid, (nodeid, localid) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        allocation = replace(TASKS, procid=procid, nodeid=nodeid, localid=localid)
        plan = plan_of(monkeypatch, allocation)
        found += places(plan)
        threads += [worker.env["OMP_NUM_THREADS"] for worker in plan.nodes[0].workers]
    assert found == [
        *[(str(rank), str(rank), "5", "3", "0", "2") for rank in range(3)],
        ("3", "0", "5", "2", "1", "2"),
        ("4", "1", "5", "2", "1", "2"),
    ]
    assert threads == ["2", "2", "2", "4", "4"]


@pytest.mark.parametrize(("tokens", "device"), [(("4", "5"), "5"), (("7",), "7"), ((), None)])
def test_a_task_takes_a_gpu_of_those_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, ...], device: str | None
) -> None:
    """SLURM shows a task all GPUs of its node, or one of them alone."""
    [worker] = plan_of(monkeypatch, TASKS, tokens=tokens).nodes[0].workers
    assert worker.env.get("CUDA_VISIBLE_DEVICES") == device


def test_all_tasks_meet_at_one_port_and_each_attempt_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_of(monkeypatch, TASKS)
    assert (
        plan_of(monkeypatch, replace(TASKS, procid=0, nodeid=0, localid=0)).master_port == first.master_port
    )
    others = [
        plan_of(monkeypatch, TASKS, attempt=1),
        plan_of(monkeypatch, replace(TASKS, step_id=4)),
        plan_of(monkeypatch, replace(TASKS, restart_count=1)),
    ]
    assert first.master_port not in {plan.master_port for plan in others}
    given = plan_of(monkeypatch, TASKS, master_addr="head", master_port=1234)
    assert (given.master_addr, given.master_port) == ("head", 1234)


def test_a_number_that_is_given_holds_for_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(monkeypatch, GPUS, tokens=("0", "1"), num_gpus=2)
    assert places(plan) == [("2", "0", "6", "2", "1", "3"), ("3", "1", "6", "2", "1", "3")]
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in plan.nodes[0].workers] == ["0,1"] * 2
    with pytest.raises(LaunchError, match=r"3 workers were asked for, but this task .* sees 2 GPU\(s\)"):
        plan_of(monkeypatch, GPUS, tokens=("0", "1"), num_gpus=3)


def test_where_nothing_is_said_of_gpus_all_that_a_task_sees_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tuple(AllocatedNode(host, tasks=1) for host in "ab")
    allocation = replace(GPUS, nodes=nodes, ntasks=2)
    seen = plan_of(monkeypatch, allocation, tokens=("0", "1", "2"))
    assert [rank for rank, *_ in places(seen)] == ["3", "4", "5"]
    assert places(plan_of(monkeypatch, allocation)) == [("1", "0", "2", "1", "1", "2")]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> SrunTaskLauncher:
    plan_of(monkeypatch, TASKS)
    return SrunTaskLauncher(OPTIONS, TASKS)


@pytest.mark.parametrize(
    ("outcome", "code", "cancels"),
    [
        (Outcome(0), 0, False),
        (Outcome(3), 3, True),
        (Outcome(128 + signal.SIGTERM, signum=signal.SIGTERM), 143, False),
        (Outcome(128 + signal.SIGHUP, signum=signal.SIGHUP), 0, False),
    ],
)
def test_the_first_task_that_fails_ends_the_others_and_is_the_code(
    launcher: SrunTaskLauncher,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    code: int,
    cancels: bool,
) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr("zlaunch.slurm.commands.cancel_step", cancelled.append)
    before = signal.getsignal(signal.SIGHUP)
    try:
        assert launcher.on_end(outcome, lambda text: None) == code
        assert bool(cancelled) is cancels
        # the signal that ends the others comes to this task, too
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is cancels
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("outcome", "ends_in_s", "cause"),
    [
        (Outcome(143, signum=signal.SIGTERM), 600, "stopped"),
        (Outcome(143, signum=signal.SIGTERM), 0, "timed out"),
        (Outcome(143), 0, "timed out"),  # the agents got the signal
        (Outcome(1), 0, "failed"),
        (Outcome(129, signum=signal.SIGHUP), 600, "failed"),  # another task of the step has
    ],
)
def test_the_cause_of_an_end_in_slurm(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, ends_in_s: int, cause: str
) -> None:
    plan_of(monkeypatch, TASKS)
    launcher = SrunTaskLauncher(OPTIONS, replace(TASKS, ends_at=int(time.time()) + ends_in_s))
    end = launcher.end_of(outcome)
    assert (end.code, end.cause) == (outcome.code, cause)


@pytest.mark.parametrize("launcher", [SrunTaskLauncher, LocalLauncher])
@pytest.mark.parametrize(("granted", "refused"), [(1, True), (2, False), (None, False)])
def test_more_gpus_than_slurm_gave_are_refused_also_where_none_is_visible(
    monkeypatch: pytest.MonkeyPatch, launcher: type[Launcher], granted: int | None, refused: bool
) -> None:
    """CPU workers would take the place of GPUs that the job does not have. Without any GPU they are meant."""
    nodes = (AllocatedNode("a", tasks=1, gpus=granted),)
    allocation = Allocation("7", nodes, True, step_id=3, procid=0, ntasks=1, localid=0, nodeid=0)
    for module in ("system.machine", "launchers.this_node"):
        monkeypatch.setattr(f"zlaunch.{module}.discover", lambda environ: Devices((), None))
    launch = replace(OPTIONS, num_gpus=2, workdir="/")
    if refused:
        with pytest.raises(
            LaunchError, match="--num_gpus 2: SLURM gave this node 1 GPU; ask salloc or sbatch"
        ):
            launcher(launch, allocation)
    else:
        assert launcher(launch, allocation).world_sizes == (2,)


LOST = frozenset(["n2"])


@pytest.mark.parametrize(
    ("outcome", "requeued"),
    [
        (Outcome(1, lost=LOST), True),
        (Outcome(1, lost=LOST, died=LOST), True),
        (Outcome(75, save_asked=True, saved=True), True),
        (Outcome(143, signum=signal.SIGTERM), True),
        (Outcome(1), False),  # a failure of the script: it would fail again
        (Outcome(0, lost=LOST), False),
        (Outcome(130, signum=signal.SIGINT, lost=LOST), False),
    ],
)
def test_a_job_is_requeued_after_a_lost_node_too(
    launcher: SrunTaskLauncher, outcome: Outcome, requeued: bool
) -> None:
    asked = replace(launcher.launch, requeue=True)
    assert SrunTaskLauncher(asked, TASKS).is_requeued(outcome) is requeued
    assert not launcher.is_requeued(outcome)
