"""Represent the plan of a launch: every decision as plain data, before anything is started.

Transports and agents only carry it out; `--dry_run` prints it; tests compare it.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zlaunch.errors import LaunchError
from zlaunch.runtime.environment import GPU_DEFAULTS, SAME_VARIABLE
from zlaunch.runtime.world_sizes import FirstBatch, write_world_sizes
from zlaunch.system.cores import written
from zlaunch.system.machine import visible_for_workers

if TYPE_CHECKING:
    from zlaunch.plan.options import Launch

# -- plan -------------------------------------------------------------------------------------------


_PLAIN_KEYS = (
    "MON",
    "TUR",
    "DON",
    "HOC",
    "JOC",
    "WHIS",
    "SORT[._-]",
    "DATASET[._-]TEXT[._-]",
    "LABEL[._-]",
    "PROMPT[._-]",
    "CHOSEN[._-]",
    "REJECTED[._-]",
)
"""Prefixes that turn KEY into another word (MONKEY) or into a column of a data set (SORT_KEY)."""
_NOT_PLAIN = "".join(rf"(?<!(?<![A-Z]){before}KEY)" for before in _PLAIN_KEYS)
SECRET_WORDS = (
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH(?!OR(?!IZATION))|"
    rf"KEY(?![A-Z]){_NOT_PLAIN}|"
    r"(?<![A-Z])PAT(?![A-Z])|(?<![A-Z])(?:PG)?PASS(?![A-Z])|"
    r"(?<![A-Z])PW(?![A-Z])|WEBHOOK"
)
"""Words in the names of variables and options whose values are secret."""
_REST_OF_ASSIGNED = r"[\w.-]*="
IN_ADDRESS = r"://[^/@\s]+@"
NOT_SHOWN = "(not shown)"
LOCAL_HOST = "localhost"
"""Names this machine in plans, events and records; in ZLAUNCH_DEBUG, the launcher is on the worker's node."""


def shown_host(host: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a node's name for the user: in a SLURM job, this machine's host name instead of localhost."""
    return socket.gethostname() if host == LOCAL_HOST and environ.get("SLURM_JOB_ID") else host


def secret_word(name: str) -> str:
    """Return the word in the name of a variable or option that makes its value secret; empty without one."""
    found = re.search(SECRET_WORDS, name, re.IGNORECASE)
    return found[0] if found else ""


def is_secret(name: str) -> bool:
    """Tell by the name of a variable or option whether its value is secret."""
    return bool(secret_word(name))


def secret_assignment(argument: str) -> tuple[int, int] | None:
    """Return where the secret word and where the value begins in `--env=HF_TOKEN=VALUE`; None where no secret
    name is given a value.
    """
    # The words and then the rest, because a pattern of both takes 5 ms more to compile at each start. No
    # [\w.-]* in front: searching for it would take the square of the length of a long argument.
    for word in re.finditer(SECRET_WORDS, argument, re.IGNORECASE):
        if rest := re.compile(_REST_OF_ASSIGNED).match(argument, word.end()):
            return word.start(), rest.end()
    return None


def without_secrets(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command line to be shown: `--env=HF_TOKEN=VALUE`, `--api_key VALUE`, without their values."""
    shown: list[str] = []
    secret_follows = False
    for argument in arguments:
        if secret_follows and not argument.startswith("-"):
            shown.append(NOT_SHOWN)
        elif found := secret_assignment(argument):
            shown.append(argument[: found[1]] + NOT_SHOWN)
        else:
            shown.append(re.sub(IN_ADDRESS, f"://{NOT_SHOWN}@", argument))
        secret_follows = argument.startswith("-") and "=" not in argument and is_secret(argument)
    return tuple(shown)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Describes one process of the job."""

    rank: int
    local_rank: int
    env: dict[str, str]
    """What is added to the node's own environment."""
    argv: tuple[str, ...]
    slot: int | None = None
    """The number of its GPU among those of the node; None for a CPU worker."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Holds one node and its workers, in order of rank."""

    host: str
    workers: tuple[WorkerPlan, ...]


@dataclass(frozen=True, slots=True)
class NodeSubset:
    """Locates the nodes of a plan in a run whose other nodes are started by other launchers."""

    first_rank: int
    world_size: int
    first_node: int
    node_count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds the whole launch. An agent gets a plan with its own node alone."""

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
    restarts: bool = False
    """There may be another attempt: the nodes keep what makes its start short."""
    in_step: bool = False
    """Other launchers of the SLURM step run the other nodes, and are told when this one is gone."""
    python: bool = True
    """The workers are Python programs under our bootstrap, which knows what SIGUSR1 and SIGUSR2 mean."""
    part: NodeSubset | None = None
    """Its place in the run; None: these nodes are the whole run."""

    @property
    def world_size(self) -> int:
        """Return how many workers this launcher starts."""
        return sum(len(node.workers) for node in self.nodes)

    @property
    def run_world_size(self) -> int:
        """Return how many workers the run has, with those of other launchers."""
        return self.world_size if self.part is None else self.part.world_size

    def for_node(self, index: int) -> Plan:
        """Return the part that one agent carries out."""
        return replace(self, nodes=(self.nodes[index],))

    def shown(self) -> str:
        """Return the plan as JSON to be read, without the values of variables that hold secrets."""
        data = asdict(self)
        for node in data["nodes"]:
            for worker in node["workers"]:
                worker["argv"] = without_secrets(worker["argv"])
                worker["env"] = {
                    key: NOT_SHOWN if is_secret(key) else re.sub(IN_ADDRESS, f"://{NOT_SHOWN}@", value)
                    for key, value in worker["env"].items()
                }
        return json.dumps(data, indent=2)

    def write(self, path: Path) -> None:
        """Write what :meth:`shown` returns to a file that only this user can read."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(self.shown() + "\n")

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        """Make a plan from parsed JSON: what `asdict` gave where it was sent."""
        nodes = tuple(
            NodePlan(
                host=node["host"],
                workers=tuple(WorkerPlan(**{**w, "argv": tuple(w["argv"])}) for w in node["workers"]),
            )
            for node in data["nodes"]
        )
        part = None if data["part"] is None else NodeSubset(**data["part"])
        return Plan(**{**data, "nodes": nodes, "preload": tuple(data["preload"]), "part": part})


# -- facts ------------------------------------------------------------------------------------------
#
# Hold the facts that a plan is made of.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Adds to a launch what all nodes and all attempts of the run have in common."""

    launch: Launch
    bootstrap: tuple[str, ...]
    """The command that starts a worker's bootstrap."""
    environ: Mapping[str, str]
    """Only asked which variables the user has set already, which are then left alone."""
    has_leases: bool = False
    """Whether agents run on other machines. They end if the launcher's heartbeat stops."""
    in_step: bool = False
    world_sizes: tuple[int, ...] = ()
    """Numbers of workers that the run may have, the one without a failure first; empty: it cannot change."""
    first_batches: tuple[FirstBatch, ...] = ()
    """The engines of the first attempt; empty: this is the first."""

    @property
    def heartbeat_s(self) -> float:
        """Return the seconds after which a silent node counts as dead; 0 without leases."""
        return self.launch.heartbeat_s if self.has_leases else 0.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Describes a node and the slots chosen there."""

    host: str
    workers: int
    cores: int
    devices: tuple[str, ...] = ()
    """One CUDA_VISIBLE_DEVICES token a worker; empty means CPU workers."""
    slots: tuple[int, ...] = ()
    """The number of each worker's GPU among those of the node; empty for CPU workers."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every worker of this node: what is exported to it from the launching machine."""
    bound: tuple[tuple[int, ...], ...] = ()
    """The CPUs of each worker, where they are to be bound."""
    shares_cores: bool = False
    """Tells whether several workers may be bound to the same CPUs."""
    first_local: int = 0
    """The local rank of the first of these workers, where others on the node are started by somebody else."""
    local_world: int | None = None
    """Counts the workers of the node in all; None: these."""
    python: str | None = None
    """The interpreter there; None: this one."""
    is_local: bool = True
    """Tells whether the launcher is on this node."""


# -- worker env -------------------------------------------------------------------------------------
#
# Write down the environment variables of each worker.


def common_env(
    run: RunFacts,
    node: NodeSpec,
    part: NodeSubset,
    node_rank: int,
    rendezvous: tuple[str, int],
    attempt: int,
    resume_dir: str | None,
) -> dict[str, str]:
    """Return what all workers of a node have in common. `rendezvous`: rank 0's address and port."""
    local_world = node.workers if node.local_world is None else node.local_world
    env = {
        "ROLE_NAME": "default",  # the user's own is in the node's
        **node.env,
        "WORLD_SIZE": str(part.world_size),
        "LOCAL_WORLD_SIZE": str(local_world),
        "LOCAL_SIZE": str(local_world),
        "CROSS_RANK": str(node_rank),
        "CROSS_SIZE": str(part.node_count),
        "MASTER_ADDR": rendezvous[0],
        "MASTER_PORT": str(rendezvous[1]),
        "PYTHONUNBUFFERED": "1",
        "ZLAUNCH_RUN_ID": run.launch.run_id,
        "ZLAUNCH_RUN_DIR": run.launch.run_dir,
        "ZLAUNCH_RESTART_COUNT": str(attempt),
        # torchrun's, for scripts and libraries that ask for them
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(part.node_count),
        "ROLE_WORLD_SIZE": str(part.world_size),
        "TORCHELASTIC_RUN_ID": run.launch.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(run.launch.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if run.launch.debug_rank is not None:
        env["ZLAUNCH_NO_TIMEOUTS"] = "1"
    if resume_dir is not None:
        env["ZLAUNCH_RESUME_DIR"] = resume_dir
    if len(run.world_sizes) > 1:
        env["ZLAUNCH_WORLD_SIZES"] = write_world_sizes(run.world_sizes)
        env["ZLAUNCH_FIRST_BATCHES"] = " ".join(map(str, run.first_batches))
    given = run.environ.keys() | node.env.keys()
    is_debugged = run.launch.debug_rank is not None
    usual = _default_env(node, single_node=part.node_count == 1, is_debugged=is_debugged)
    for key, value in usual.items():
        if given.isdisjoint((key, *SAME_VARIABLE.get(key, ()))):
            env[key] = value
    return env


def worker_env(run: RunFacts, node: NodeSpec, rank: int, index: int) -> dict[str, str]:
    """Return what the node's worker number `index` has of its own."""
    local_rank = node.first_local + index
    env = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)}
    if rank == run.launch.debug_rank:
        env["ZLAUNCH_DEBUG"] = LOCAL_HOST if node.is_local else node.host
    if run.launch.virtual_local_rank:
        env |= {"LOCAL_RANK": "0", "ZLAUNCH_LOCAL_RANK": str(local_rank)}
    if node.host == "localhost":  # elsewhere the folder may not be there: the bootstrap offers another
        env["TORCHELASTIC_ERROR_FILE"] = f"{run.launch.run_dir}/logs/error_{rank:05d}.json"
    if node.bound:
        cpus = node.bound[index]
        env["ZLAUNCH_CPUS"] = written(cpus)
        if not node.shares_cores and "OMP_NUM_THREADS" not in run.environ:
            env["OMP_NUM_THREADS"] = str(len(cpus))
    if visible := visible_for_workers(node.devices, alone=run.launch.virtual_local_rank):
        env["CUDA_VISIBLE_DEVICES"] = visible[index]
    return env


def _default_env(node: NodeSpec, *, single_node: bool, is_debugged: bool) -> dict[str, str]:
    """Return the settings that give way to the user's own."""
    env = {"OMP_NUM_THREADS": str(max(1, node.cores // (node.local_world or node.workers)))}
    if not node.devices:
        # Training on CPU is bound by page faults; huge pages in malloc take a quarter off a step.
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    else:
        env |= GPU_DEFAULTS
    if is_debugged:
        # It ends a process whose watchdog thread stands still, as at a breakpoint that stops all threads.
        env["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    if single_node:
        # Gloo otherwise takes the address of the host name, which may not resolve to this machine.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


# -- build ------------------------------------------------------------------------------------------
#
# Make a plan: number the workers and write down the environment and the command line of each.


def make_plan(
    run: RunFacts,
    nodes: Sequence[NodeSpec],
    *,
    master_addr: str,
    master_port: int,
    attempt: int = 0,
    resume_dir: str | None = None,
    part: NodeSubset | None = None,
) -> Plan:
    """Number the workers in order of the nodes and write down the environment and argv of each. Raises
    LaunchError.

    `part` is given where other launchers start the other nodes; None: these nodes are the whole run.
    """
    given = part
    part = part or NodeSubset(0, sum(node.workers for node in nodes), 0, len(nodes))
    if run.launch.debug_rank is not None and run.launch.debug_rank >= part.world_size:
        rank = run.launch.debug_rank
        raise LaunchError(f"--debug {rank}: there is no rank {rank} among {part.world_size} worker(s)")
    program = run.launch.program
    first_rank = part.first_rank
    flag = [] if program.mode == "script" else [f"--{program.mode}"]
    node_plans = []
    for node_rank, node in enumerate(nodes, start=part.first_node):
        bootstrap = run.bootstrap if node.python is None else (node.python, *run.bootstrap[1:])
        rendezvous = (master_addr, master_port)
        common = common_env(run, node, part, node_rank, rendezvous, attempt, resume_dir)
        workers = []
        for index in range(node.workers):
            rank = first_rank + index
            local_rank = node.first_local + index
            env = {**common, **worker_env(run, node, rank, index)}
            if program.pass_local_rank:
                env["ZLAUNCH_PASSES_LOCAL_RANK"] = "1"
            argv = (*bootstrap, *flag, program.name, *program.args)
            slot = node.slots[index] if node.slots else None
            workers.append(WorkerPlan(rank, local_rank, env, argv, slot))
        node_plans.append(NodePlan(node.host, tuple(workers)))
        first_rank += node.workers
    return Plan(
        run_id=run.launch.run_id,
        run_dir=run.launch.run_dir,
        master_addr=master_addr,
        master_port=master_port,
        nodes=tuple(node_plans),
        cwd=run.launch.workdir,
        grace_s=run.launch.grace_s,
        heartbeat_s=run.heartbeat_s,
        preload=program.preload,
        in_step=run.in_step,
        python=program.mode != "exec",
        part=given,
    )
