"""The plan of a launch: every decision as plain data, before anything is started.

Transports and agents only carry it out; `--dry_run` prints it; tests compare it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zlaunch.system.devices import visible_for_workers

_SECRET_WORDS = (
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH(?!OR)|KEY(?![A-Z])|(?<![A-Z])PAT(?![A-Z])|"
    r"(?<![A-Z])(?:PG)?PASS(?![A-Z])"
)
"""In names of variables and options whose values are nobody else's business."""
_ASSIGNED = rf"[\w.-]*(?:{_SECRET_WORDS})[\w.-]*="
_IN_ADDRESS = r"://[^/@\s]+@"
_NOT_SHOWN = "(not shown)"


def _is_secret(name: str) -> bool:
    return re.search(_SECRET_WORDS, name, re.IGNORECASE) is not None


def without_secrets(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command line to be shown: `--env=HF_TOKEN=VALUE`, `--api_key VALUE`, without their values."""
    shown: list[str] = []
    secret_follows = False
    for argument in arguments:
        if secret_follows and not argument.startswith("-"):
            shown.append(_NOT_SHOWN)
        elif found := re.search(_ASSIGNED, argument, re.IGNORECASE):
            shown.append(argument[: found.end()] + _NOT_SHOWN)
        else:
            shown.append(re.sub(_IN_ADDRESS, f"://{_NOT_SHOWN}@", argument))
        secret_follows = argument.startswith("-") and "=" not in argument and _is_secret(argument)
    return tuple(shown)


@dataclass(frozen=True, slots=True)
class Target:
    """What every worker runs."""

    mode: Literal["script", "module", "exec"]
    name: str
    args: tuple[str, ...] = ()
    pass_local_rank: bool = True
    """Put `--local_rank=N` before the script's own arguments, as DeepSpeed does."""
    preload: tuple[str, ...] = ()
    """What its workers will import anyway and may share."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node and the slots chosen there."""

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
    heartbeat_s: float = 0.0
    """An agent that hears nothing from the launcher for so long ends the run; 0 for a launcher on its node.
    """
    preload: tuple[str, ...] = ()
    """Modules that one process on each node imports before it forks the workers; none: each by itself."""
    in_step: bool = False
    """Other launchers of the same SLURM step run the other nodes, and are told when this one is gone."""
    python: bool = True
    """The workers are Python programs under our bootstrap, which knows what SIGUSR1 and SIGUSR2 mean."""

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

    def shown(self) -> str:
        """Return it as JSON to be read: values of variables that hold secrets are left out."""
        data = asdict(self)
        for node in data["nodes"]:
            for worker in node["workers"]:
                worker["argv"] = without_secrets(worker["argv"])
                worker["env"] = {
                    key: _NOT_SHOWN if _is_secret(key) else re.sub(_IN_ADDRESS, f"://{_NOT_SHOWN}@", value)
                    for key, value in worker["env"].items()
                }
        return json.dumps(data, indent=2)

    def write(self, path: Path) -> None:
        """Write what :meth:`shown` says, for this user alone."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(self.shown() + "\n")

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
        return Plan(**{**data, "nodes": nodes, "preload": tuple(data["preload"])})


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
    heartbeat_s: float = 0.0,
    first_rank: int = 0,
    world_size: int | None = None,
    first_node: int = 0,
    node_count: int | None = None,
    restart_count: int = 0,
    resume_dir: str | None = None,
    in_step: bool = False,
) -> Plan:
    """Number the workers in order of the nodes and write down the environment and argv of each.

    `bootstrap` is the command that starts a worker's bootstrap; `environ` is only asked which variables the
    user has set already, which are then left alone. Where other launchers start the other nodes,
    `first_rank`, `world_size`, `first_node` and `node_count` say where these nodes stand among all.
    """
    world_size = sum(node.workers for node in nodes) if world_size is None else world_size
    node_count = len(nodes) if node_count is None else node_count
    flag = [] if target.mode == "script" else [f"--{target.mode}"]
    node_plans = []
    for node_rank, node in enumerate(nodes, start=first_node):
        visible = visible_for_workers(node.devices)
        defaults = _default_env(node, single_node=node_count == 1)
        workers = []
        local_world = node.workers if node.local_world is None else node.local_world
        launcher = bootstrap if node.python is None else (node.python, *bootstrap[1:])
        for index in range(node.workers):
            local_rank = node.first_local + index
            env = {
                **node.env,
                "RANK": str(first_rank + index),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(local_world),
                "LOCAL_SIZE": str(local_world),
                "CROSS_RANK": str(node_rank),
                "CROSS_SIZE": str(node_count),
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(master_port),
                "PYTHONUNBUFFERED": "1",
                "ZLAUNCH_RUN_ID": run_id,
                "ZLAUNCH_RUN_DIR": run_dir,
                "ZLAUNCH_RESTART_COUNT": str(restart_count),
            }
            if resume_dir is not None:
                env["ZLAUNCH_RESUME_DIR"] = resume_dir
            given = environ.keys() | node.env.keys()
            env |= {
                key: value for key, value in defaults.items() if given.isdisjoint((key, *_SAME.get(key, ())))
            }
            if node.bound:
                cpus = node.bound[index]
                env["ZLAUNCH_CPUS"] = ",".join(map(str, cpus))
                if "OMP_NUM_THREADS" not in environ:
                    env["OMP_NUM_THREADS"] = str(len(cpus))
            if visible:
                env["CUDA_VISIBLE_DEVICES"] = visible[index]
            own = [f"--local_rank={local_rank}"] if target.pass_local_rank else []
            argv = (*launcher, *flag, target.name, *own, *target.args)
            workers.append(WorkerPlan(first_rank + index, local_rank, env, argv))
        node_plans.append(NodePlan(node.host, tuple(workers)))
        first_rank += node.workers
    return Plan(
        run_id=run_id,
        run_dir=run_dir,
        master_addr=master_addr,
        master_port=master_port,
        nodes=tuple(node_plans),
        cwd=cwd,
        grace_s=grace_s,
        heartbeat_s=heartbeat_s,
        preload=target.preload,
        in_step=in_step,
        python=target.mode != "exec",
    )


_SAME = {"PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF",)}
"""Maps a variable to its other names: what the user says under any of them counts."""


def _default_env(node: NodeSpec, *, single_node: bool) -> dict[str, str]:
    """Good settings that give way to the user's own."""
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
