"""Read what SLURM tells a process through its environment. Pure: SLURM itself is not asked.

Facts of a job are read inside an allocation of any kind (batch script, `salloc` shell, `srun` task), facts of
a step only inside an `srun` task. What SLURM does not say is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.hostlist import HostListError, expand, ranges, short

_LAST_STEP_ID = 0xFFFFFFF0
"""Step ids from this one on are SLURM's: batch, extern, interactive (the shell of `salloc`)."""

_NAMED_STEPS = ("batch", "extern", "interactive")
_MAX_NODES = 65536
_REPEATED = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_TYPED_COUNT = re.compile(r"(?:[A-Za-z0-9_.-]+:)?(\d{1,9})", re.ASCII)
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)


class SlurmError(LaunchError, ValueError):
    """Says that SLURM answered something unexpected, or nothing; the text is for the user."""


@dataclass(frozen=True, slots=True)
class AllocatedNode:
    """Describes one node, in SLURM's order."""

    host: str
    cpus: int | None = None
    """CPUs of the job on this node."""
    tasks: int | None = None
    """Tasks on this node, of the step inside a step, otherwise those that a plain `srun` would start."""
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Describes the job, or inside a step the step, that this process is part of."""

    job_id: str
    nodes: tuple[AllocatedNode, ...]
    inside_step: bool
    """Tells whether `srun` started this process, which then is one of ``ntasks`` alike."""
    step_id: int | None = None
    """Id of the step; None outside a step, as are procid, localid and nodeid."""
    procid: int | None = None
    ntasks: int | None = None
    """Number of tasks, of the step inside a step, otherwise those that were asked for."""
    localid: int | None = None
    nodeid: int | None = None
    """Index in ``nodes`` of the node this process runs on."""
    restart_count: int = 0
    """How often the job was requeued."""
    ends_at: int | None = None
    """When the job's time limit ends, in seconds since the epoch."""
    het_size: int = 1
    """Number of components of a heterogeneous job; the nodes are those of one of them."""


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Says where a task of a step stands among the others."""

    rank_of_node: int
    nodes: int
    local_task: int
    tasks_here: int
    one_per_node: bool
    """Tells whether every node has a single task."""


def read(environ: Mapping[str, str], *, has_terminal: bool = False) -> Allocation | None:
    """Return the allocation that this environment describes; None outside SLURM.

    `has_terminal` says that this process has a controlling terminal. In a step that `srun --pty` has made it
    is then a shell's child, and not one of several tasks alike.
    """
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    job_hosts = _hosts(environ, "SLURM_JOB_NODELIST") or _hosts(environ, "SLURM_NODELIST")
    if not job_hosts:
        raise SlurmError(f"SLURM_JOB_ID={job} is set, but SLURM_JOB_NODELIST is not")
    step_hosts = _hosts(environ, "SLURM_STEP_NODELIST") or job_hosts
    named = environ.get("SLURM_STEP_ID", "").lower() in _NAMED_STEPS
    step_id = None if named else _number(environ, "SLURM_STEP_ID")
    procid = _number(environ, "SLURM_PROCID")
    inside = (
        step_id is not None
        and step_id < _LAST_STEP_ID
        and procid is not None
        and not (has_terminal and environ.get("SLURM_PTY_PORT"))
        # sbatch hands on its whole environment: a step of other nodes is that of the shell it was called in.
        and set(step_hosts) <= set(job_hosts)
    )
    hosts = step_hosts if inside else job_hosts
    nodeid = _number(environ, "SLURM_NODEID")
    if inside and nodeid is not None and nodeid >= len(hosts):
        raise SlurmError(f"SLURM_NODEID={nodeid}: the step has {len(hosts)} node(s)")
    cpus = _per_node(environ, "SLURM_JOB_CPUS_PER_NODE", job_hosts)
    tasks = _per_node(environ, "SLURM_STEP_TASKS_PER_NODE", hosts) if inside else {}
    tasks = tasks or _per_node(environ, "SLURM_TASKS_PER_NODE", hosts)
    gpus = _gpus(environ, hosts, _own_index(environ, hosts, nodeid), inside=inside)
    return Allocation(
        job_id=str(job),
        nodes=tuple(
            AllocatedNode(host, cpus.get(host), tasks.get(host), count)
            for host, count in zip(hosts, gpus, strict=True)
        ),
        inside_step=inside,
        step_id=step_id if inside else None,
        procid=procid if inside else None,
        ntasks=_number(environ, *["SLURM_STEP_NUM_TASKS"] * inside, "SLURM_NTASKS"),
        localid=_number(environ, "SLURM_LOCALID") if inside else None,
        nodeid=nodeid if inside else None,
        restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
        ends_at=_number(environ, "SLURM_JOB_END_TIME"),
        het_size=_number(environ, "SLURM_HET_SIZE", "SLURM_PACK_SIZE") or 1,
    )


def with_gpus(allocation: Allocation, granted: Mapping[str, int]) -> Allocation:
    """Fill in the GPUs of nodes that the environment does not speak of, from what the job was granted.

    A step may use fewer than the job has: on its own node it says how many, the others have no more.
    """
    said = [node.gpus for node in allocation.nodes if node.gpus is not None]
    nodes = tuple(
        replace(node, gpus=min([granted[node.host], *(said if allocation.inside_step else ())]))
        if node.gpus is None and node.host in granted
        else node
        for node in allocation.nodes
    )
    return replace(allocation, nodes=nodes)


def in_step_place(allocation: Allocation) -> StepPlace:
    """Return where this task stands. Raises SlurmError outside a step."""
    if not allocation.inside_step:
        raise SlurmError(f"job {allocation.job_id}: this process was not started by srun")
    if allocation.nodeid is None or allocation.localid is None:
        raise SlurmError(f"step {allocation.job_id}.{allocation.step_id}: no SLURM_NODEID or SLURM_LOCALID")
    node = allocation.nodes[allocation.nodeid]
    tasks_here = node.tasks
    if tasks_here is None:
        if allocation.ntasks != len(allocation.nodes):
            raise SlurmError(f"step {allocation.job_id}.{allocation.step_id}: no SLURM_STEP_TASKS_PER_NODE")
        tasks_here = 1
    if allocation.localid >= tasks_here:
        raise SlurmError(f"SLURM_LOCALID={allocation.localid}: {node.host} has {tasks_here} task(s)")
    one_per_node = all(other.tasks in (1, None) for other in allocation.nodes)
    return StepPlace(allocation.nodeid, len(allocation.nodes), allocation.localid, tasks_here, one_per_node)


def _hosts(environ: Mapping[str, str], name: str) -> list[str]:
    text = environ.get(name, "")
    try:
        hosts = expand(text)
    except HostListError as error:
        raise SlurmError(f"{name}={short(text)}: {error}") from None
    if len(set(hosts)) < len(hosts):
        raise SlurmError(f"{name}={short(text)}: a node appears twice")
    return hosts


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of these variables that is set."""
    for name in names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not _NUMBER.fullmatch(text):
            raise SlurmError(f"{name}={short(text)}: not a number")
        return int(text)
    return None


def _per_node(environ: Mapping[str, str], name: str, hosts: Sequence[str]) -> dict[str, int]:
    """Read `2(x3),1` as host -> number; empty when it is not said, or said of other nodes than these."""
    text = environ.get(name, "").strip()
    counts: list[int] = []
    for item in text.split(",") if text else ():
        match = _REPEATED.fullmatch(item.strip())
        if match is None or len(counts) + int(match[2] or 1) > _MAX_NODES:
            raise SlurmError(f"{name}={short(text)}: {short(item)} is not a count such as 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return dict(zip(hosts, counts, strict=True)) if len(counts) == len(hosts) else {}


def _own_index(environ: Mapping[str, str], hosts: Sequence[str], nodeid: int | None) -> int | None:
    """Return which of the nodes this process runs on; None on a login node."""
    name = environ.get("SLURMD_NODENAME")
    if name in hosts:
        return hosts.index(name)
    if nodeid is not None and nodeid < len(hosts):
        return nodeid
    return 0 if len(hosts) == 1 else None


def _gpus(
    environ: Mapping[str, str], hosts: Sequence[str], own: int | None, *, inside: bool
) -> list[int | None]:
    """Return the GPUs of each node. Indices and `ON_NODE` describe this process's node only."""
    everywhere = _gpus_per_node(environ)
    counts = [everywhere] * len(hosts)
    here = [_listed_gpus(environ, "SLURM_STEP_GPUS")] if inside else []
    here += [_number(environ, "SLURM_GPUS_ON_NODE"), _listed_gpus(environ, "SLURM_JOB_GPUS")]
    known = [count for count in here if count is not None]
    if own is not None and known:
        counts[own] = known[0]
    return counts


def _gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Read `4`, `a100:4` or `a100:2,v100:2`."""
    text = environ.get("SLURM_GPUS_PER_NODE", "").strip()
    if not text:
        return None
    matches = [_TYPED_COUNT.fullmatch(item.strip()) for item in text.split(",")]
    if None in matches:
        raise SlurmError(f"SLURM_GPUS_PER_NODE={short(text)}: not a count such as 4 or a100:4")
    return sum(int(match[1]) for match in matches if match)


def _listed_gpus(environ: Mapping[str, str], name: str) -> int | None:
    """Count the indices in `0,1` or `0-3`."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    indices: set[int] = set()
    for item, numbers in ranges(text):
        if not numbers or len(numbers) > _MAX_NODES:
            raise SlurmError(f"{name}={short(text)}: {short(item)} is not a GPU's index")
        indices.update(numbers)
    return len(indices)
