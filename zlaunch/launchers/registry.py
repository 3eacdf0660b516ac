"""List all launchers, and choose one for a command line. Each is imported when it is used.

To add one, write a file with a subclass of `ClusterLauncher` or `ThisNodeLauncher`, and a line in NAMED, or
in _IMPLIED if `--launcher` does not name it.
"""

from __future__ import annotations

import os
import shutil
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from zlaunch.errors import LaunchError
from zlaunch.launchers.found import read_job
from zlaunch.plan.options import DEFAULT_HOSTFILE, Launch, own_names

if TYPE_CHECKING:
    from zlaunch.launchers.base import Launcher
    from zlaunch.slurm.environment import Allocation

LOCAL = "local"
SSH = "ssh"
SLURM = "slurm"
_SRUN_TASK = "step"
_MANUAL = "hand"
NAMED = {
    LOCAL: "this_node:LocalLauncher",
    SSH: "ssh:SshLauncher",
    "openssh": "ssh:OpenSshLauncher",
    SLURM: "slurm:SlurmLauncher",
    "openmpi": "cluster:OpenMpiLauncher",
}
"""Name for --launcher -> the launcher's `module:class`."""
_IMPLIED = {_SRUN_TASK: "slurm:SrunTaskLauncher", _MANUAL: "this_node:ManualLauncher"}
"""Launchers that follow from the environment or other options."""


def load(name: str) -> type[Launcher]:
    """Import a launcher's class."""
    kind: type[Launcher] = resolve_name(f"zlaunch.launchers.{(NAMED | _IMPLIED)[name]}")
    return kind


def choose(launch: Launch, allocation: Allocation | None) -> tuple[str, str]:
    """Return the name of the launcher for these options, and why it is this one. Raises LaunchError."""
    if launch.node_rank is not None:
        why = f"the environment says that this is node {launch.node_rank} of {launch.num_nodes}"
        return _MANUAL, why if launch.pod else "--no_ssh"
    inside = allocation is not None and allocation.inside_step
    by_slurm = launch.launcher == SLURM or (launch.launcher is None and launch.hostfile is None)
    if allocation is not None and allocation.het_size > 1 and by_slurm:
        raise LaunchError(
            f"job {allocation.job_id} is heterogeneous ({allocation.het_size} components), which is not "
            "supported: give a --hostfile with the hosts of all, or --launcher local"
        )
    if launch.launcher == SLURM and allocation is None:
        raise LaunchError(
            "--launcher slurm: this is not inside a SLURM job (no SLURM_JOB_ID); use sbatch or salloc"
        )
    if launch.launcher is not None:
        name = _SRUN_TASK if launch.launcher == SLURM and inside else launch.launcher
        return name, f"--launcher {launch.launcher}"
    if launch.hostfile is not None:
        return SSH, f"--hostfile {launch.hostfile}"
    if allocation is not None:
        alone = len(allocation.nodes) == 1
        if inside and alone and allocation.ntasks == 1:
            return LOCAL, f"a single task of SLURM job {allocation.job_id}"
        if inside:
            return _SRUN_TASK, f"started by srun in SLURM job {allocation.job_id}"
        if alone and launch.requeue and shutil.which("srun") is not None:
            return SLURM, "--requeue: SLURM tells only its steps of a preemption"
        if alone and allocation.nodes[0].host in own_names():
            return LOCAL, f"SLURM job {allocation.job_id} has this node alone"
        return SLURM, f"SLURM job {allocation.job_id}"
    job = read_job(os.environ)
    if job is not None:
        return (LOCAL, f"{job.name} has this node alone") if job.is_here else (SSH, job.name)
    if os.path.isfile(DEFAULT_HOSTFILE):
        return SSH, f"there is a {DEFAULT_HOSTFILE}"
    return LOCAL, "no hostfile and no SLURM job"
