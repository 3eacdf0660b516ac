"""Run on the hosts of a hostfile, each reached by Open MPI's mpirun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlaunch.launchers.cluster import ClusterLauncher

if TYPE_CHECKING:
    from zlaunch.transports import Transport


class OpenMpiLauncher(ClusterLauncher):
    """Starts one mpirun for each host."""

    name = "openmpi"

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a host. Raises NodeError."""
        from zlaunch.transports.command import mpirun_prefix, open_command

        return open_command(host, mpirun_prefix(host), self.options.python, self.agent_log(host))
