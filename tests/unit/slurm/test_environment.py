"""Test what is read from SLURM_*."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zlaunch.errors import LaunchError
from zlaunch.launchers.registry import choose
from zlaunch.slurm.commands import read_granted
from zlaunch.slurm.environment import (
    AllocatedNode,
    Allocation,
    SlurmError,
    StepPlace,
    in_step_place,
    read,
    with_gpus,
)

JOB = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_NTASKS": "3",
}
BATCH = {
    **JOB,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "node1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_GPUS": "0,1",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node3",
    "SLURM_STEP_GPUS": "5",
}


def test_outside_slurm_there_is_nothing() -> None:
    assert read({}) is None
    assert read({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": ""}) is None


def test_batch_script() -> None:
    assert read({**BATCH, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1795787057"}) == Allocation(
        job_id="42",
        nodes=(
            AllocatedNode("node1", 16, 1, 2),
            AllocatedNode("node2", 16, 1, None),
            AllocatedNode("node3", 8, 1, None),
        ),
        inside_step=False,
        ntasks=3,
        restart_count=2,
        ends_at=1795787057,
    )


def test_shell_of_salloc_on_a_login_node() -> None:
    found = read({**JOB, "SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": "9"})
    assert found is not None and not found.inside_step
    assert [node.gpus for node in found.nodes] == [4, 4, 4]


@pytest.mark.parametrize("step_id", ["4294967290", "4294967291", "batch", "interactive", ""])
def test_slurms_own_steps_are_no_steps(step_id: str) -> None:
    found = read({**STEP, "SLURM_STEP_ID": step_id})
    assert found is not None and not found.inside_step
    assert [node.host for node in found.nodes] == ["node1", "node2", "node3"]
    assert found.step_id is found.procid is found.localid is found.nodeid is None


def test_step_of_the_shell_that_called_sbatch_is_no_step() -> None:
    left_over = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "login7", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert read({**BATCH, **left_over}) == read(BATCH)


def test_step_has_its_own_nodes_and_tasks() -> None:
    assert read(STEP) == Allocation(
        job_id="42",
        nodes=(AllocatedNode("node2", 16, 2, None), AllocatedNode("node3", 8, 1, 1)),
        inside_step=True,
        step_id=3,
        procid=2,
        ntasks=3,
        localid=0,
        nodeid=1,
    )


def test_what_is_not_said_is_none() -> None:
    found = read({"SLURM_JOBID": "42", "SLURM_NODELIST": "a,b"})
    assert found == Allocation("42", (AllocatedNode("a"), AllocatedNode("b")), inside_step=False)
    other_nodes = read({**JOB, "SLURM_JOB_CPUS_PER_NODE": "16"})
    assert other_nodes is not None and [node.cpus for node in other_nodes.nodes] == [None] * 3


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, None),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, 3),
        ({"SLURM_JOB_GPUS": "0,1"}, 2),
        ({"SLURM_JOB_GPUS": "0-3,6"}, 5),
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "1"}, 1),
        ({"SLURM_JOB_GPUS": ""}, None),
        ({"SLURM_STEP_GPUS": "0,1,2"}, None),
    ],
)
def test_gpus(variables: dict[str, str], gpus: int | None) -> None:
    found = read({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", **variables})
    assert found is not None and found.nodes[0].gpus == gpus


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SLURM_JOB_ID", "x", "not a number"),
        ("SLURM_JOB_NODELIST", "n[1-", "unbalanced or nested brackets"),
        ("SLURM_JOB_NODELIST", "n1,n1", "a node appears twice"),
        ("SLURM_STEP_NODELIST", "n[3-1]", "is reversed"),
        ("SLURM_STEP_ID", "-1", "not a number"),
        ("SLURM_PROCID", "first", "not a number"),
        ("SLURM_JOB_CPUS_PER_NODE", "16(x", "'16(x' is not a count such as 2 or 2(x3)"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,,1", "'' is not a count"),
        ("SLURM_JOB_CPUS_PER_NODE", "1(x999999999)", "is not a count"),
        ("SLURM_GPUS_PER_NODE", "a100:many", "not a count such as 4 or a100:4"),
        ("SLURM_JOB_GPUS", "0,x", "'x' is not a GPU's index"),
        ("SLURM_STEP_GPUS", "3-1", "'3-1' is not a GPU's index"),
        ("SLURM_GPUS_ON_NODE", "two", "not a number"),
        ("SLURM_RESTART_COUNT", "1.5", "not a number"),
    ],
)
def test_errors_name_the_variable_and_its_value(name: str, value: str, words: str) -> None:
    with pytest.raises(SlurmError) as caught:
        read({**STEP, name: value})
    assert str(caught.value).startswith(f"{name}={value!r}: ")
    assert words in str(caught.value)


def test_a_job_without_nodes_is_an_error() -> None:
    with pytest.raises(SlurmError, match="SLURM_JOB_NODELIST is not"):
        read({"SLURM_JOB_ID": "42"})
    with pytest.raises(SlurmError, match=r"SLURM_NODEID=7: the step has 2 node\(s\)"):
        read({**STEP, "SLURM_NODEID": "7"})


def place(**variables: str) -> StepPlace:
    allocation = read({**STEP, **variables})
    assert allocation is not None
    return in_step_place(allocation)


def test_place_with_one_task_a_node() -> None:
    assert place(SLURM_STEP_TASKS_PER_NODE="1(x2)") == StepPlace(1, 2, 0, 1, True)


def test_place_with_one_task_a_gpu() -> None:
    found = place(SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_STEP_GPUS="0,1", SLURM_LOCALID="1")
    assert found == StepPlace(1, 2, 1, 2, False)


def test_other_places() -> None:
    assert place(SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_STEP_GPUS="0-3").one_per_node is False
    assert place(
        SLURM_STEP_TASKS_PER_NODE="", SLURM_TASKS_PER_NODE="", SLURM_STEP_NUM_TASKS="2"
    ) == StepPlace(1, 2, 0, 1, True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_ID": ""}, "job 42: this process was not started by srun"),
        ({"SLURM_LOCALID": ""}, "step 42.3: no SLURM_NODEID or SLURM_LOCALID"),
        ({"SLURM_LOCALID": "1"}, r"SLURM_LOCALID=1: node3 has 1 task\(s\)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": ""}, "no SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_no_place(variables: dict[str, str], words: str) -> None:
    with pytest.raises(SlurmError, match=words):
        place(**variables)


values = st.text(alphabet="0129n[]-,(x):a ", max_size=8) | st.text(max_size=8)


@given(st.dictionaries(st.sampled_from([*STEP, "SLURM_GPUS_PER_NODE", "SLURM_RESTART_COUNT"]), values))
def test_any_values_give_an_allocation_or_our_error(variables: dict[str, str]) -> None:
    try:
        allocation = read({**STEP, **variables})
        if allocation is not None and allocation.inside_step:
            in_step_place(allocation)
    except SlurmError:
        return


counts = st.lists(st.integers(1, 3), min_size=1, max_size=8)


@given(counts)
def test_repeated_counts_are_read_as_slurm_writes_them(numbers: list[int]) -> None:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][0] == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(f"{run[0]}(x{len(run)})" if len(run) > 1 else str(run[0]) for run in runs)
    nodes = f"n[1-{len(numbers)}]"
    found = read({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": text})
    assert found is not None and [node.cpus for node in found.nodes] == numbers


def test_what_the_controller_says_fills_in_the_other_nodes() -> None:
    text = """JobId=4 JobName=x
   NumNodes=3 TRES=cpu=3
     Nodes=node[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0,1),nic:1
     Nodes=node3 CPU_IDs=0-3 Mem=0 GRES=gpu:1(IDX:0),gpu:v100:3(IDX:1-3)
"""
    granted = read_granted(text)
    assert granted == {"node1": 2, "node2": 2, "node3": 4}
    batch = read(BATCH)
    assert batch is not None
    assert [node.gpus for node in with_gpus(batch, granted).nodes] == [2, 2, 4]
    step = read(STEP)
    assert step is not None
    assert [node.gpus for node in with_gpus(step, granted).nodes] == [1, 1]
    assert with_gpus(batch, {}) == batch


PTY = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PTY_PORT": "4711",
}


@pytest.mark.parametrize(("terminal", "inside"), [(True, False), (False, True)])
def test_a_shell_of_srun_is_no_task_among_others(terminal: bool, inside: bool) -> None:
    """What a step without a terminal has of SLURM_PTY_PORT is inherited from a shell around it."""
    found = read(PTY, has_terminal=terminal)
    assert found is not None and found.inside_step == inside


def test_a_heterogeneous_job_is_refused_by_name() -> None:
    found = read({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_HET_SIZE": "2"})
    assert found is not None and found.het_size == 2
    options = SimpleNamespace(node_rank=None, launcher=None, hostfile=None)
    with pytest.raises(LaunchError, match="heterogeneous"):
        choose(options, found)  # type: ignore[arg-type]  # these three are all it reads
    options.launcher = "local"
    assert choose(options, found)[0] == "local"  # type: ignore[arg-type]
