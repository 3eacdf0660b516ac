"""Start agents by srun or mpirun, one such command a node, with pipes through it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zlaunch.system.processes import python_module_argv
from zlaunch.transports.local import LocalTransport, open_program

_PER_TASK = (
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"),
    *("SLURM_GPUS_PER_SOCKET", "SLURM_TRES_BIND"),
)
"""What the job asked for each task; `srun` would apply it to the agent, which is to have everything."""


def srun_prefix(host: str, cpus: int | None) -> tuple[str, ...]:
    """Return the srun that starts one unbound task on a node of this allocation, beside what runs there."""
    return (
        "srun",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        *((f"--cpus-per-task={cpus}",) if cpus else ()),
        "--overlap",
        "--mpi=none",
        "--cpu-bind=none",
        "--unbuffered",
        "--quiet",
    )


def mpirun_prefix(host: str) -> tuple[str, ...]:
    """Return the mpirun that starts one unbound process on a node."""
    return ("mpirun", "--allow-run-as-root", "-np", "1", "-host", host, "--bind-to", "none")


def open_command(host: str, prefix: Sequence[str], python: str, stderr_path: Path) -> LocalTransport:
    """Start the agent with a Python of the node. Raises NodeError when the starter is not there."""
    argv = (*prefix, python, *python_module_argv("zlaunch.node.agent")[1:])
    return open_program(host, argv, stderr_path, without=_PER_TASK)
