"""Read a run's shape from the environment of pods, MPI tasks and batch systems that start one process a node.

Kubeflow's PyTorchJob (and all that imitate it) sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, counting
pods, and torchrun's own variables PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, which win.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.grammar import is_host
from zlaunch.hostfiles.hostlist import HostListError, expand, short
from zlaunch.plan.options import own_names

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation


# -- mpi tasks --------------------------------------------------------------------------------------
#
# Read a run's shape from the environment of one task a node, as mpirun, mpiexec or `flux run` start them.
#
# Open MPI sets OMPI_COMM_WORLD_*, MPICH and what comes of it (Intel MPI, MVAPICH) PMI_* and MPI_LOCAL*,
# Flux
# FLUX_TASK_* and FLUX_JOB_*. None of them says where task 0 is: the user does, by MASTER_ADDR.


@dataclass(frozen=True, slots=True)
class MpiTask:
    """Holds this task's place among several."""

    starter: str
    rank: int
    size: int
    is_one_a_node: bool
    once_a_node: str
    """Gives the starter's option for one task on each node."""


def read_task(environ: Mapping[str, str]) -> MpiTask | None:
    """Return this task's place; None outside of several tasks. Raises LaunchError."""
    found = None
    if "OMPI_COMM_WORLD_SIZE" in environ:
        rank, size, here = _numbers(
            environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
        )
        found = MpiTask("mpirun", rank, size, here == 1, "--map-by ppr:1:node")
    elif "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ:
        rank, size, here = _numbers(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
        found = MpiTask("mpiexec", rank, size, here == 1, "-ppn 1")
    elif "FLUX_TASK_RANK" in environ and "FLUX_JOB_NNODES" in environ:
        rank, size, nodes = _numbers(environ, "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES")
        found = MpiTask("flux run", rank, size, size == nodes, "--tasks-per-node=1")
    return found if found is not None and found.size > 1 else None


def check_alone(task: MpiTask) -> None:
    """Refuse tasks that share a node. Raises LaunchError."""
    if not task.is_one_a_node:
        raise LaunchError(
            f"{task.starter} started zlaunch {task.size} times, more than once per node, but zlaunch starts "
            f"the workers itself: {task.once_a_node}; or use --launcher local for {task.size} separate runs"
        )


def _numbers(environ: Mapping[str, str], *names: str) -> list[int]:
    for name in names:
        text = environ.get(name, "")
        if not (text.isascii() and text.isdigit()):
            raise LaunchError(f"{name}={text}: not a number")
    return [int(environ[name]) for name in names]


# -- pods -------------------------------------------------------------------------------------------


_INSIDE = ("ZLAUNCH_RUN_ID", "LOCAL_RANK")
"""A worker has them: the rest is about its own run."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, slots=True)
class Pod:
    """Holds this node's place among several."""

    node_rank: int
    nodes: int
    workers: int | None
    """On each node; None: as many as it has GPUs."""
    master_addr: str
    master_port: int
    """0 where the environment does not say it."""


def read_pod(environ: Mapping[str, str]) -> Pod | None:
    """Return this pod's place; None outside of several pods. Raises LaunchError."""
    if any(name in environ for name in _INSIDE):
        return None
    nodes = _nodes(environ)
    if nodes is None:
        if _number(environ, "WORLD_SIZE", 1) < 2 or not all(environ.get(name) for name in _NEEDED):
            return None
        nodes = _number(environ, "WORLD_SIZE", 1)
        rank = _number(environ, "RANK", 0)
    elif nodes == 1:
        return None
    else:
        rank = _number(environ, "PET_NODE_RANK" if environ.get("PET_NODE_RANK") else "RANK", -1)
        if rank < 0:
            raise LaunchError(f"PET_NNODES={nodes} is set, but PET_NODE_RANK is not")
    host, _, port = _endpoint(environ.get("PET_RDZV_ENDPOINT", "").strip())
    address = environ.get("PET_MASTER_ADDR") or host or environ.get("MASTER_ADDR")
    if not address:
        raise LaunchError(f"PET_NNODES={nodes} is set, but neither PET_MASTER_ADDR nor MASTER_ADDR is")
    if not 0 <= rank < nodes:
        raise LaunchError(f"this pod is node {rank} of {nodes}: nodes count from 0")
    ports = {**environ, **({"PET_RDZV_PORT": port} if port else {})}
    named = [name for name in ("PET_MASTER_PORT", "PET_RDZV_PORT", "MASTER_PORT") if ports.get(name)]
    return Pod(rank, nodes, _workers(environ), address, _number(ports, named[0], 0) if named else 0)


def take_pod(given: dict[str, Any], allocation: Allocation | None) -> None:
    """Fill in what the variables of a pod say, where no option says otherwise. Raises LaunchError."""
    given["pod"] = False
    named = [name for name in ("hostfile", "launcher", "node_rank") if given[name] is not None]
    if allocation is not None or named:
        return
    for warning in half_said(os.environ):
        print(f"zlaunch: warning: {warning}", file=sys.stderr)
    pod = read_pod(os.environ) or _of_mpi(os.environ, given["master_addr"])
    if pod is None:
        alone = not any(name in os.environ for name in _INSIDE)
        if alone and given["include"] is None and given["exclude"] is None:
            given["num_gpus"] = given["num_gpus"] or _workers(os.environ)
        return
    where = f"the environment says that this is node {pod.node_rank} of {pod.nodes}"
    for name in ("include", "exclude"):
        if given[name] is not None:
            raise LaunchError(f"--{name}: {where}; use --num_gpus N, or --launcher local to train alone")
    if given["num_nodes"] not in (None, pod.nodes):
        raise LaunchError(f"--num_nodes {given['num_nodes']}: {where}")
    if given.get("num_processes") is not None:
        raise LaunchError(f"--num_processes counts the workers of all nodes: {where}; use --num_gpus N")
    given.update(pod=True, no_ssh=True, node_rank=pod.node_rank, num_nodes=pod.nodes)
    given["num_gpus"] = given["num_gpus"] or pod.workers
    given["master_addr"] = given["master_addr"] or pod.master_addr
    given["master_port"] = given["master_port"] or pod.master_port


def _of_mpi(environ: Mapping[str, str], master_addr: str | None) -> Pod | None:
    """Return this node's place among those that mpirun and its like have started zlaunch on."""
    task = None if any(name in environ for name in _INSIDE) else read_task(environ)
    if task is None:
        return None
    check_alone(task)
    address = master_addr or environ.get("MASTER_ADDR")
    if not address:
        raise LaunchError(
            f"{task.starter} gives no address of node 0 (this is node {task.rank} of {task.size}): "
            "set MASTER_ADDR on every node, or pass --master_addr"
        )
    return Pod(task.rank, task.size, None, address, _number(environ, "MASTER_PORT", 0))


def half_said(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning where the variables are there in part, so that this node would train alone."""
    if any(name in environ for name in _INSIDE) or read_pod(environ) is not None:
        return
    if environ.get("WORLD_SIZE", "1").strip() not in ("", "1"):
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            yield (
                f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but not {' and '.join(missing)}: "
                "this machine trains alone"
            )


def _nodes(environ: Mapping[str, str]) -> int | None:
    text = environ.get("PET_NNODES", "").strip()
    low, colon, high = text.partition(":")
    if colon and low != high:
        raise LaunchError(
            f"PET_NNODES={text}: an elastic number of nodes is not supported; set one number, "
            "and let Kubernetes restart the pods after a failure"
        )
    return _number({"PET_NNODES": low}, "PET_NNODES", 1) if text else None


def _endpoint(text: str) -> tuple[str, str, str]:
    """Take HOST, HOST:PORT or [IPV6]:PORT apart."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, "", port.removeprefix(":")
    return text.partition(":") if text.count(":") == 1 else (text, "", "")


def _workers(environ: Mapping[str, str]) -> int | None:
    text = environ.get("PET_NPROC_PER_NODE", "").strip().lower()
    if text in ("", "auto", "gpu"):
        return None
    count = 1 if text == "cpu" else _number(environ, "PET_NPROC_PER_NODE", 1)
    if count < 1:
        raise LaunchError(f"PET_NPROC_PER_NODE={text}: 1 or more")
    return count


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise LaunchError(f"{name}={text}: not a number")
    return int(text)


# -- batch systems ----------------------------------------------------------------------------------
#
# Read the hosts of a job from the variables of PBS, LSF and Grid Engine, or from Flux. Their launcher is
# ssh's.


_FLUX_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Holds a job of a batch system."""

    name: str
    """Names its system and number, for the user."""
    hosts: tuple[str, ...]

    @property
    def is_here(self) -> bool:
        """Tell whether it has this machine alone."""
        own = {name.partition(".")[0] for name in own_names()}
        return len(self.hosts) == 1 and self.hosts[0].partition(".")[0] in own


def read_job(environ: Mapping[str, str]) -> BatchJob | None:
    """Return the job that this process is in; None outside of any. Raises LaunchError."""
    if any(name in environ for name in _INSIDE):
        return None
    if path := environ.get("PBS_NODEFILE"):  # a line for each slot
        return _job("PBS", environ.get("PBS_JOBID"), _first_words(path, "PBS_NODEFILE"))
    if path := environ.get("PE_HOSTFILE"):  # host, slots, queue, processors
        return _job("Grid Engine", environ.get("JOB_ID"), _first_words(path, "PE_HOSTFILE"))
    if text := environ.get("LSB_MCPU_HOSTS"):  # host, slots, host, slots
        return _job("LSF", environ.get("LSB_JOBID"), text.split()[::2])
    if "FLUX_URI" in environ and shutil.which("flux"):  # inside of an instance, as of `flux batch`
        return _job("Flux", environ.get("FLUX_JOB_ID"), _flux_hosts())
    return None


def _flux_hosts() -> list[str]:
    """Ask Flux for the hosts of this job, or of the instance. Raises LaunchError."""
    command = ["flux", "hostlist", "local"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FLUX_TIMEOUT_S
        )
        if done.returncode == 0:
            return list(expand(done.stdout.strip()))
        why = done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"no answer for {_FLUX_TIMEOUT_S:.0f} s"
    except (OSError, HostListError) as error:
        why = str(error)
    raise LaunchError(f"`{' '.join(command)}`: {why}; use --hostfile, or --launcher local") from None


def _job(system: str, number: str | None, hosts: Iterable[str]) -> BatchJob | None:
    found = tuple(dict.fromkeys(hosts))
    if bad := [host for host in found if not is_host(host)]:
        raise LaunchError(
            f"{system} lists {short(bad[0])} as a host of this job, which is not a valid host name: "
            "use --hostfile, or --launcher local"
        )
    return BatchJob(f"{system} job{f' {number}' if number else ''}", found) if found else None


def _first_words(path: str, variable: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line.split()[0] for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise LaunchError(
            f"{variable} is {path}, which cannot be read: {why}; use --hostfile, or --launcher local"
        ) from None
