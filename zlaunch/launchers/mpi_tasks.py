"""Read a run's shape from the environment of one task a node, as mpirun, mpiexec or `flux run` start them.

Open MPI sets OMPI_COMM_WORLD_*, MPICH and what comes of it (Intel MPI, MVAPICH) PMI_* and MPI_LOCAL*, Flux
FLUX_TASK_* and FLUX_JOB_*. None of them says where task 0 is: the user does, by MASTER_ADDR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zlaunch.errors import LaunchError


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
