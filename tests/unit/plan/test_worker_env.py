"""Test the variables of each worker on nodes that are not alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from zlaunch.errors import LaunchError
from zlaunch.plan.options import Launch, Program
from zlaunch.plan.plan import NodeSpec, NodeSubset, RunFacts, WorkerPlan, make_plan

RUN = RunFacts(
    launch=Launch(
        program=Program("script", "train.py"), run_id="id", run_dir="/runs/id", workdir="/work", grace_s=3.0
    ),
    bootstrap=("python", "-m", "boot"),
    environ={},
)


def workers(*nodes: NodeSpec, environ: Mapping[str, str] = {}, **more: Any) -> list[WorkerPlan]:
    run = replace(RUN, environ=environ)
    plan = make_plan(run, nodes, master_addr="a", master_port=29500, **more)
    return [worker for node in plan.nodes for worker in node.workers]


def of(found: list[WorkerPlan], name: str) -> list[str | None]:
    return [worker.env.get(name) for worker in found]


@pytest.mark.parametrize(
    ("count", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 64, 16), (8, 4, 1), (1, 1, 1)]
)
def test_workers_share_the_cores_of_their_node(count: int, cores: int, threads: int) -> None:
    assert of(workers(NodeSpec("a", count, cores)), "OMP_NUM_THREADS") == [str(threads)] * count


def test_each_node_has_its_own_cores_and_workers() -> None:
    found = workers(NodeSpec("a", 2, 64), NodeSpec("b", 1, 16), NodeSpec("c", 4, 8))
    assert of(found, "OMP_NUM_THREADS") == ["32", "32", "16", "2", "2", "2", "2"]
    assert of(found, "LOCAL_WORLD_SIZE") == of(found, "LOCAL_SIZE") == ["2", "2", "1", *["4"] * 4]
    assert of(found, "LOCAL_RANK") == ["0", "1", "0", "0", "1", "2", "3"]
    assert of(found, "GROUP_RANK") == of(found, "CROSS_RANK") == ["0", "0", "1", *["2"] * 4]
    assert set(of(found, "GROUP_WORLD_SIZE")) == {"3"}


def test_workers_that_others_start_on_the_node_share_its_cores_too() -> None:
    """A task of a step plans for one worker, and is one of six on its node."""
    node = NodeSpec("a", workers=1, cores=24, first_local=4, local_world=6)
    found = workers(node, part=NodeSubset(10, 12, 1, 2))
    assert of(found, "OMP_NUM_THREADS") == ["4"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [found[0].env[name] for name in names] == ["10", "12", "4", "6", "1", "2"]
    assert found[0].env["ROLE_RANK"] == "10" and found[0].env["ROLE_WORLD_SIZE"] == "12"


@pytest.mark.parametrize("where", ["launcher", "node"])
def test_threads_that_somebody_has_chosen_stay(where: str) -> None:
    chosen = {"OMP_NUM_THREADS": "3"}
    node = NodeSpec("a", 2, 64, env=chosen if where == "node" else {})
    found = workers(node, environ=chosen if where == "launcher" else {})
    # what the launcher's own environment says reaches the workers without the plan
    assert of(found, "OMP_NUM_THREADS") == ["3" if where == "node" else None] * 2


def test_bound_workers_have_a_thread_for_each_of_their_cpus() -> None:
    bound = ((0, 1, 2), (5, 7))
    found = workers(NodeSpec("a", 2, 64, bound=bound))
    assert of(found, "ZLAUNCH_CPUS") == ["0-2", "5,7"] and of(found, "OMP_NUM_THREADS") == ["3", "2"]
    both = workers(NodeSpec("a", 2, 64, bound=bound, shares_cores=True))
    assert of(both, "OMP_NUM_THREADS") == ["32", "32"], "others compute there, too"
    kept = workers(NodeSpec("a", 2, 64, bound=bound), environ={"OMP_NUM_THREADS": "9"})
    assert of(kept, "OMP_NUM_THREADS") == [None, None]


def test_gloo_takes_the_loopback_only_where_there_is_one_node() -> None:
    assert of(workers(NodeSpec("localhost", 1, 1)), "GLOO_SOCKET_IFNAME") == ["lo"]
    assert of(workers(NodeSpec("a", 1, 1), NodeSpec("b", 1, 1)), "GLOO_SOCKET_IFNAME") == [None, None]
    alone = workers(NodeSpec("a", 1, 1), part=NodeSubset(1, 2, 1, 2))
    assert of(alone, "GLOO_SOCKET_IFNAME") == [None], "the other node is another launcher's"


def test_only_a_node_that_sees_the_run_s_folder_writes_errors_there() -> None:
    found = workers(NodeSpec("localhost", 1, 1), NodeSpec("b", 1, 1))
    assert of(found, "TORCHELASTIC_ERROR_FILE") == ["/runs/id/logs/error_00000.json", None]


def test_an_attempt_knows_its_number_and_where_to_go_on() -> None:
    assert of(workers(NodeSpec("a", 1, 1)), "ZLAUNCH_RESUME_DIR") == [None]
    again = workers(NodeSpec("a", 1, 1), attempt=2, resume_dir="/saved")
    assert of(again, "ZLAUNCH_RESUME_DIR") == ["/saved"]
    assert of(again, "ZLAUNCH_RESTART_COUNT") == of(again, "TORCHELASTIC_RESTART_COUNT") == ["2"]


def test_a_virtual_local_rank_is_0_and_sees_its_gpu_alone() -> None:
    run = replace(RUN, launch=replace(RUN.launch, virtual_local_rank=True))
    plan = make_plan(run, [NodeSpec("a", 2, 8, devices=("4", "6"))], master_addr="a", master_port=29500)
    found = list(plan.nodes[0].workers)
    assert of(found, "LOCAL_RANK") == ["0", "0"] and of(found, "ZLAUNCH_LOCAL_RANK") == ["0", "1"]
    assert of(found, "CUDA_VISIBLE_DEVICES") == ["4", "6"]
    assert [worker.local_rank for worker in found] == [0, 1]


def test_one_rank_waits_for_a_debugger_and_none_gives_up_on_it() -> None:
    run = replace(RUN, launch=replace(RUN.launch, debug_rank=2))
    nodes = [NodeSpec("a", 2, 8), NodeSpec("b", 2, 8, is_local=False)]
    plan = make_plan(run, nodes, master_addr="a", master_port=29500)
    found = [worker for node in plan.nodes for worker in node.workers]
    assert of(found, "ZLAUNCH_DEBUG") == [None, None, "b", None]
    assert of(found, "ZLAUNCH_NO_TIMEOUTS") == ["1"] * 4
    assert of(found, "TORCH_NCCL_ENABLE_MONITORING") == ["0"] * 4
    local = make_plan(
        replace(run, launch=replace(RUN.launch, debug_rank=1)), nodes, master_addr="a", master_port=29500
    )
    assert local.nodes[0].workers[1].env["ZLAUNCH_DEBUG"] == "localhost"
    with pytest.raises(LaunchError, match=r"--debug 4: there is no rank 4 among 4 worker\(s\)"):
        make_plan(
            replace(run, launch=replace(RUN.launch, debug_rank=4)), nodes, master_addr="a", master_port=29500
        )


def test_the_name_of_the_role_is_the_users() -> None:
    assert of(workers(NodeSpec("a", 1, 1)), "ROLE_NAME") == ["default"]
    assert of(workers(NodeSpec("a", 1, 1, env={"ROLE_NAME": "trainer"})), "ROLE_NAME") == ["trainer"]


def test_workers_know_the_numbers_of_ranks_that_the_run_may_have() -> None:
    node = NodeSpec("a", 2, 8)
    elastic = replace(RUN, world_sizes=(6, 2, 4))
    plan = make_plan(elastic, [node], master_addr="a", master_port=29500)
    assert of(list(plan.nodes[0].workers), "ZLAUNCH_WORLD_SIZES") == ["6 2-4:2"] * 2
    assert of(workers(node), "ZLAUNCH_WORLD_SIZES") == [None] * 2
