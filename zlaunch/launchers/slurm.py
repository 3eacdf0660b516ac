"""Run on the nodes of a SLURM allocation, each reached by srun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.launchers.base import FOR_SSH, NEEDS_NODES
from zlaunch.launchers.cluster import ClusterLauncher

if TYPE_CHECKING:
    from zlaunch.transports import Transport


class SlurmLauncher(ClusterLauncher):
    """Starts one srun for each node, from inside the job."""

    name = "slurm"
    refuses = dict.fromkeys(FOR_SSH, NEEDS_NODES)

    def entries(self) -> list[HostEntry]:
        """Return the nodes of the job."""
        assert self.allocation is not None
        return [HostEntry(n.host, slots=n.gpus or self.options.num_gpus) for n in self.allocation.nodes]

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a node. Raises NodeError."""
        from zlaunch.transports.command import open_command, srun_prefix

        assert self.allocation is not None
        (cpus,) = (node.cpus for node in self.allocation.nodes if node.host == host)
        prefix = srun_prefix(host, cpus)
        return open_command(host, prefix, self.options.python, self.agent_log(host))
