"""Make a plan: number the workers and write down the environment and the command line of each."""

from __future__ import annotations

from collections.abc import Sequence

from zlaunch.errors import LaunchError
from zlaunch.plan.facts import NodeSpec, RunFacts
from zlaunch.plan.plan import NodePlan, Part, Plan, WorkerPlan
from zlaunch.plan.worker_env import common_env, worker_env


def make_plan(
    run: RunFacts,
    nodes: Sequence[NodeSpec],
    *,
    master_addr: str,
    master_port: int,
    attempt: int = 0,
    resume_dir: str | None = None,
    part: Part | None = None,
) -> Plan:
    """Number the workers in order of the nodes and write down the environment and argv of each. Raises
    LaunchError.

    `part` is given where other launchers start the other nodes; None: these nodes are the whole run.
    """
    given = part
    part = part or Part(0, sum(node.workers for node in nodes), 0, len(nodes))
    if run.debug_rank is not None and run.debug_rank >= part.world_size:
        rank = run.debug_rank
        raise LaunchError(f"--debug {rank}: there is no rank {rank} among {part.world_size} worker(s)")
    program, first_rank = run.program, part.first_rank
    flag = [] if program.mode == "script" else [f"--{program.mode}"]
    node_plans = []
    for node_rank, node in enumerate(nodes, start=part.first_node):
        bootstrap = run.bootstrap if node.python is None else (node.python, *run.bootstrap[1:])
        rendezvous = (master_addr, master_port)
        common = common_env(run, node, part, node_rank, rendezvous, attempt, resume_dir)
        workers = []
        for index in range(node.workers):
            rank, local_rank = first_rank + index, node.first_local + index
            env = {**common, **worker_env(run, node, rank, index)}
            own = [f"--local_rank={env['LOCAL_RANK']}"] if program.pass_local_rank else []
            argv = (*bootstrap, *flag, program.name, *own, *program.args)
            slot = node.slots[index] if node.slots else None
            workers.append(WorkerPlan(rank, local_rank, env, argv, slot))
        node_plans.append(NodePlan(node.host, tuple(workers)))
        first_rank += node.workers
    return Plan(
        run_id=run.run_id,
        run_dir=run.run_dir,
        master_addr=master_addr,
        master_port=master_port,
        nodes=tuple(node_plans),
        cwd=run.cwd,
        grace_s=run.grace_s,
        heartbeat_s=run.heartbeat_s,
        preload=program.preload,
        in_step=run.in_step,
        python=program.mode != "exec",
        part=given,
    )
