"""Run on the hosts of a hostfile, reached by paramiko or by the `ssh` program."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from zlaunch.errors import NodeError
from zlaunch.launchers.cluster import ClusterLauncher
from zlaunch.plan.options import own_names

if TYPE_CHECKING:
    from zlaunch.supervisor.nodes import Node, Say
    from zlaunch.transports import Transport


class SshLauncher(ClusterLauncher):
    """Reaches the hosts by paramiko, and by the `ssh` program where the configuration asks for more."""

    name = "ssh"
    _takes_paramiko = True

    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        """Start the agents, while paramiko is imported."""
        # It takes a while, in which `ssh -G` is asked about the hosts.
        threading.Thread(target=import_module, args=("paramiko",), daemon=True).start()
        return super().connect(hosts, say)

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a host. Raises NodeError."""
        from zlaunch.transports.local import open_local
        from zlaunch.transports.ssh import resolve

        entry = self.selection.entries[host]
        launch = self.launch
        if host in own_names() and entry.user is None and entry.port is None:
            return open_local(host, self.agent_log(host))
        port = entry.port if entry.port is not None else launch.ssh_port
        settings = resolve(host, user=entry.user, port=port, config=launch.ssh_config)
        from zlaunch.transports.ssh import AuthenticationRefused, open_ssh

        if not self._takes_paramiko or settings.needs_openssh:
            return self._open_by_program(host, port, settings.timeout_s)
        try:
            return open_ssh(settings, launch.python, accept_new=launch.ssh_accept_new)
        except AuthenticationRefused:
            if not settings.gssapi:
                raise
            return self._open_by_program(host, port, settings.timeout_s)

    def _open_by_program(self, host: str, port: int | None, timeout_s: float) -> Transport:
        from zlaunch.transports.ssh import open_openssh, remote_command

        launch = self.launch
        return open_openssh(
            host,
            remote_command(launch.python),
            self.agent_log(host),
            user=self.selection.entries[host].user,
            port=port,
            config=launch.ssh_config,
            accept_new=launch.ssh_accept_new,
            timeout_s=timeout_s,
        )


class OpenSshLauncher(SshLauncher):
    """Reaches the hosts by the `ssh` program alone."""

    name = "openssh"
    _takes_paramiko = False
