"""Make a plan: number the workers and write down the environment and the command line of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zlaunch.plan.plan import NodePlan, Plan, Program, WorkerPlan
from zlaunch.system.devices import visible_for_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Holds what all nodes and all attempts of a run have in common."""

    program: Program
    run_id: str
    run_dir: str
    cwd: str
    grace_s: float
    bootstrap: tuple[str, ...]
    """The command that starts a worker's bootstrap."""
    environ: Mapping[str, str]
    """Only asked which variables the user has set already, which are then left alone."""
    heartbeat_s: float = 0.0
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Describes a node and the slots chosen there."""

    host: str
    workers: int
    cores: int
    devices: tuple[str, ...] = ()
    """One CUDA_VISIBLE_DEVICES token a worker; empty means CPU workers."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every worker of this node: what is exported to it from the launching machine."""
    bound: tuple[tuple[int, ...], ...] = ()
    """The CPUs of each worker, where they are to be bound."""
    first_local: int = 0
    """The local rank of the first of these workers, where others on the node are started by somebody else."""
    local_world: int | None = None
    """How many workers the node has in all; None: these."""
    python: str | None = None
    """The interpreter there; None: this one."""


@dataclass(frozen=True, slots=True)
class Part:
    """Says where the nodes of a plan stand in a run whose other nodes are started by other launchers."""

    first_rank: int
    world_size: int
    first_node: int
    node_count: int


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
    """Number the workers in order of the nodes and write down the environment and argv of each.

    `part` is given where other launchers start the other nodes; None: these nodes are the whole run.
    """
    part = part or Part(0, sum(node.workers for node in nodes), 0, len(nodes))
    program, first_rank = run.program, part.first_rank
    flag = [] if program.mode == "script" else [f"--{program.mode}"]
    node_plans = []
    for node_rank, node in enumerate(nodes, start=part.first_node):
        visible = visible_for_workers(node.devices)
        local_world = node.workers if node.local_world is None else node.local_world
        bootstrap = run.bootstrap if node.python is None else (node.python, *run.bootstrap[1:])
        common = {
            **node.env,
            "WORLD_SIZE": str(part.world_size),
            "LOCAL_WORLD_SIZE": str(local_world),
            "LOCAL_SIZE": str(local_world),
            "CROSS_RANK": str(node_rank),
            "CROSS_SIZE": str(part.node_count),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
            "PYTHONUNBUFFERED": "1",
            "ZLAUNCH_RUN_ID": run.run_id,
            "ZLAUNCH_RUN_DIR": run.run_dir,
            "ZLAUNCH_RESTART_COUNT": str(attempt),
        }
        if resume_dir is not None:
            common["ZLAUNCH_RESUME_DIR"] = resume_dir
        given = run.environ.keys() | node.env.keys()
        for key, value in _default_env(node, single_node=part.node_count == 1).items():
            if given.isdisjoint((key, *_SAME.get(key, ()))):
                common[key] = value
        workers = []
        for index in range(node.workers):
            rank, local_rank = first_rank + index, node.first_local + index
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            if node.bound:
                cpus = node.bound[index]
                env["ZLAUNCH_CPUS"] = ",".join(map(str, cpus))
                if "OMP_NUM_THREADS" not in run.environ:
                    env["OMP_NUM_THREADS"] = str(len(cpus))
            if visible:
                env["CUDA_VISIBLE_DEVICES"] = visible[index]
            own = [f"--local_rank={local_rank}"] if program.pass_local_rank else []
            argv = (*bootstrap, *flag, program.name, *own, *program.args)
            workers.append(WorkerPlan(rank, local_rank, env, argv))
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
    )


_SAME = {"PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF",)}
"""Maps a variable to its other names: what the user says under any of them counts."""


def _default_env(node: NodeSpec, *, single_node: bool) -> dict[str, str]:
    """Return the settings that give way to the user's own."""
    env = {"OMP_NUM_THREADS": str(max(1, node.cores // (node.local_world or node.workers)))}
    if not node.devices:
        # Training on CPU is bound by page faults; huge pages in malloc take a quarter off a step.
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    else:
        # Gathers and reductions have a communicator each; without a common order two kernels could wait for
        # each other's place on the device.
        env["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        # The memory of units is given back and taken again all the time, in sizes that differ.
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if single_node:
        # Gloo otherwise takes the address of the host name, which may not resolve to this machine.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
