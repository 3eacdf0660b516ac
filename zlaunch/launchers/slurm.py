"""Runs on the nodes of a SLURM allocation, each reached by srun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.launchers.base import FOR_SSH, NEEDS_NODES
from zlaunch.launchers.cluster import ClusterLauncher
from zlaunch.plan.options import Options

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation
    from zlaunch.transports import Transport


class SlurmLauncher(ClusterLauncher):
    """Starts one srun for each node, from inside the job."""

    name = "slurm"
    refuses = dict.fromkeys(FOR_SSH, NEEDS_NODES)

    def __init__(self, options: Options, allocation: Allocation) -> None:
        """Take the nodes of the job. Raises LaunchError."""
        entries = [HostEntry(node.host, slots=node.gpus or options.num_gpus) for node in allocation.nodes]
        super().__init__(options, entries)
        self._cpus = {node.host: node.cpus for node in allocation.nodes}

    @classmethod
    def create(cls, options: Options, allocation: Allocation | None) -> SlurmLauncher:
        """Make the launcher of a job. Raises LaunchError."""
        assert allocation is not None
        return cls(options, allocation)

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a node. Raises NodeError."""
        from zlaunch.transports.command import open_command, srun_prefix

        prefix = srun_prefix(host, self._cpus.get(host))
        return open_command(host, prefix, self.options.python, self.agent_log(host))
