"""Run on the nodes of a SLURM allocation, each reached by srun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.launchers.base import FOR_SSH, NEEDS_NODES, unseen_gpus
from zlaunch.launchers.cluster import ClusterLauncher

if TYPE_CHECKING:
    from zlaunch.supervisor.nodes import Node
    from zlaunch.transports import Transport


class SlurmLauncher(ClusterLauncher):
    """Starts one srun for each node, from inside the job."""

    name = "slurm"
    refuses = dict.fromkeys(FOR_SSH, NEEDS_NODES)

    def entries(self) -> list[HostEntry]:
        """Return the nodes of the job."""
        assert self.allocation is not None
        return [HostEntry(n.host, slots=n.gpus or self.options.num_gpus) for n in self.allocation.nodes]

    def find_surprises(self, nodes: Sequence[Node]) -> Sequence[str]:
        """Say where SLURM gave GPUs that no worker will see."""
        assert self.allocation is not None
        granted = {node.host: node.gpus or 0 for node in self.allocation.nodes}
        unseen = {node.host: granted[node.host] for node in nodes if not node.facts.devices}
        blind = [host for host, count in unseen.items() if count]
        if not blind:
            return ()
        counts = sorted({unseen[host] for host in blind})
        return (f"{', '.join(blind)}: {unseen_gpus(' or '.join(map(str, counts)))}",)

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a node. Raises NodeError."""
        from zlaunch.transports.command import open_command, srun_prefix

        assert self.allocation is not None
        (cpus,) = (node.cpus for node in self.allocation.nodes if node.host == host)
        prefix = srun_prefix(host, cpus)
        return open_command(host, prefix, self.options.python, self.agent_log(host))
