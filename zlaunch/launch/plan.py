"""The plan of a launch: every decision as plain data, before anything is started.

Transports and agents only carry it out; `--dry_run` prints it; tests compare it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zlaunch.launch.devices import visible_for_workers


@dataclass(frozen=True, slots=True)
class Target:
    """What every worker runs."""

    mode: Literal["script", "module", "exec"]
    name: str
    args: tuple[str, ...] = ()
    pass_local_rank: bool = True
    """Put `--local_rank=N` before the script's own arguments, as DeepSpeed does."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node and the slots chosen there."""

    host: str
    workers: int
    cores: int
    devices: tuple[str, ...] = ()
    """One CUDA_VISIBLE_DEVICES token a worker; empty means CPU workers."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One process of the job."""

    rank: int
    local_rank: int
    env: dict[str, str]
    """What is added to the node's own environment."""
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node and its workers, in order of rank."""

    host: str
    workers: tuple[WorkerPlan, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole launch. An agent gets the same thing with its own node alone."""

    run_id: str
    run_dir: str
    master_addr: str
    master_port: int
    nodes: tuple[NodePlan, ...]
    cwd: str
    grace_s: float

    @property
    def world_size(self) -> int:
        """How many workers there are in all."""
        return sum(len(node.workers) for node in self.nodes)

    def for_node(self, index: int) -> Plan:
        """The part that one agent carries out."""
        return replace(self, nodes=(self.nodes[index],))

    def to_json(self, indent: int | None = None) -> str:
        """ASCII JSON: arguments that are not valid UTF-8 survive as lone surrogates."""
        return json.dumps(asdict(self), indent=indent)

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """The inverse of `to_json`."""
        return Plan.from_dict(json.loads(text))

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        """A plan from parsed JSON."""
        nodes = tuple(
            NodePlan(
                host=node["host"],
                workers=tuple(WorkerPlan(**{**w, "argv": tuple(w["argv"])}) for w in node["workers"]),
            )
            for node in data["nodes"]
        )
        return Plan(**{**data, "nodes": nodes})


def make_plan(
    target: Target,
    nodes: Sequence[NodeSpec],
    *,
    run_id: str,
    run_dir: str,
    master_addr: str,
    master_port: int,
    cwd: str,
    grace_s: float,
    bootstrap: Sequence[str],
    environ: Mapping[str, str],
) -> Plan:
    """Number the workers in order of the nodes and write down the environment and argv of each.

    `bootstrap` is the command that starts a worker's bootstrap; `environ` is only asked which variables the
    user has set already, which are then left alone.
    """
    world_size = sum(node.workers for node in nodes)
    flag = [] if target.mode == "script" else [f"--{target.mode}"]
    first_rank = 0
    node_plans = []
    for node_rank, node in enumerate(nodes):
        visible = visible_for_workers(node.devices)
        defaults = _default_env(node, single_node=len(nodes) == 1)
        workers = []
        for local_rank in range(node.workers):
            env = {
                "RANK": str(first_rank + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(node.workers),
                "LOCAL_SIZE": str(node.workers),
                "CROSS_RANK": str(node_rank),
                "CROSS_SIZE": str(len(nodes)),
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(master_port),
                "PYTHONUNBUFFERED": "1",
                "ZLAUNCH_RUN_ID": run_id,
                "ZLAUNCH_RUN_DIR": run_dir,
            }
            env |= {key: value for key, value in defaults.items() if key not in environ}
            if visible:
                env["CUDA_VISIBLE_DEVICES"] = visible[local_rank]
            own = [f"--local_rank={local_rank}"] if target.pass_local_rank else []
            argv = (*bootstrap, *flag, target.name, *own, *target.args)
            workers.append(WorkerPlan(first_rank + local_rank, local_rank, env, argv))
        node_plans.append(NodePlan(node.host, tuple(workers)))
        first_rank += node.workers
    return Plan(run_id, run_dir, master_addr, master_port, tuple(node_plans), cwd, grace_s)


def _default_env(node: NodeSpec, *, single_node: bool) -> dict[str, str]:
    """Good settings that give way to the user's own."""
    env = {"OMP_NUM_THREADS": str(max(1, node.cores // node.workers))}
    if not node.devices:
        # Training on CPU is bound by page faults; huge pages in malloc take a quarter off a step.
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    if single_node:
        # Gloo otherwise takes the address of the host name, which may not resolve to this machine.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
