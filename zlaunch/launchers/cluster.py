"""Start agents on other nodes: the base of the launchers that do, and the one by Open MPI."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from zlaunch.errors import LaunchError, NodeError
from zlaunch.hostfiles.grammar import HostEntry, read
from zlaunch.launchers.base import NEEDS_DEBUGPY, HostSelection, Launcher
from zlaunch.launchers.found import read_job
from zlaunch.plan.options import DEFAULT_HOSTFILE, Launch, agreed_port, forwarded_env
from zlaunch.plan.plan import NodeSpec, Plan
from zlaunch.plan.world_sizes import possible_world_sizes
from zlaunch.supervisor.nodes import close_all, connect, kill_leftovers_on_hosts
from zlaunch.system.cores import flat

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation
    from zlaunch.supervisor.nodes import LostNodeProcesses, Node, Rendezvous, Say
    from zlaunch.transports import Transport


# -- cluster ----------------------------------------------------------------------------------------


class ClusterLauncher(Launcher):
    """Starts an agent on each host of a hostfile or of an allocation."""

    spans_nodes = True
    advice: ClassVar[str] = ""
    """How to get more hosts and slots."""

    def __init__(self, launch: Launch, allocation: Allocation | None) -> None:
        """Choose hosts and slots, as far as they are known. Raises LaunchError."""
        super().__init__(launch, allocation, forwarded_env(os.environ) | launch.worker_env)
        self.selection = HostSelection(launch, self.entries(), self.advice)

    def entries(self) -> list[HostEntry]:
        """Return the hosts of the hostfile that was given, of the batch job that this is, or of the usual
        hostfile. Raises LaunchError.
        """
        job = read_job(os.environ) if self.launch.hostfile is None else None
        if job is not None:
            return [HostEntry(host) for host in job.hosts]
        path = self.launch.hostfile or DEFAULT_HOSTFILE
        if self.launch.hostfile is None and not os.path.isfile(path):
            raise LaunchError(
                f"--launcher {self.name} needs a --hostfile, or a job of PBS, LSF or Grid Engine"
            )
        return read(path)

    @abstractmethod
    def open_transport(self, host: str) -> Transport:
        """Start the agent of a host. Raises NodeError."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts to connect to."""
        return self.selection.hosts()

    @property
    def where(self) -> str:
        """Return the hosts, and the number of workers where the slots are known before the hosts answer."""
        first = len(self.hosts) - self.launch.spares
        spare = f" (spare: {', '.join(self.spare_hosts)})" if self.spare_hosts else ""
        slots = self.selection.chosen or {}
        count = sum(len(slots[host]) for host in self.hosts[:first] if host in slots)
        workers = "" if count == 0 else f": {count} worker{'s' * (count > 1)}"
        return ", ".join(self.hosts[:first]) + spare + workers

    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        """Start agents, ask for slots that are not known yet, release nodes that the filters leave out."""
        nodes, errors = connect(hosts, self.open_transport, self.launch.connect_timeout_s, say)
        if not nodes:
            return [], errors
        if self.selection.chosen is None:
            found = {node.host: len(node.facts.devices) or 1 for node in nodes}
            self.selection.apply_filters({**dict.fromkeys((error.host for error in errors), 0), **found})
        chosen = self._chosen()
        close_all([node for node in nodes if node.host not in chosen])
        return [node for node in nodes if node.host in chosen], errors

    def gpus_of(self, node: Node) -> Sequence[str]:
        """Return the GPUs of the chosen slots. A slot that is not there is named by the plan."""
        devices = node.facts.devices
        return [devices[slot] for slot in self._chosen()[node.host] if slot < len(devices)]

    def kill_leftovers(self, lost: Mapping[str, LostNodeProcesses], run_id: str) -> frozenset[str]:
        """End the processes that a run has left on hosts whose agents have died; return those without any."""
        return kill_leftovers_on_hosts(lost, self.open_transport, run_id)

    def plan(self, nodes: Sequence[Node], rendezvous: Rendezvous | None, attempt: int) -> Plan:
        """Make the plan for the nodes that are there. Raises NodeError."""
        interfaces = rendezvous.interfaces if rendezvous is not None else ("",) * len(nodes)
        specs = [self._spec(node, interface) for node, interface in zip(nodes, interfaces, strict=True)]
        versions = [tuple(map(int, node.facts.python.split(".")[:2])) for node in nodes]
        if rendezvous is None:  # one node, perhaps of a larger run that somebody else puts together
            address = self.launch.master_addr or "127.0.0.1"
            port = self.launch.master_port
        else:
            address = rendezvous.address
            port = rendezvous.port
        plan = self._make(specs, address, port, attempt, safe_path=min(versions) >= (3, 11))
        for node, planned in zip(nodes, plan.nodes, strict=True):
            if self.lacks_debugger(planned, is_there=node.facts.debugpy):
                raise NodeError(node.host, NEEDS_DEBUGPY)
        return plan

    def known_plan(self) -> Plan | None:
        """Return the plan without what only the nodes can tell: cores, devices, the rendezvous."""
        if self.selection.chosen is None:
            return None
        env = dict(self.environ)
        python = self.launch.python
        specs = [
            NodeSpec(host, workers=len(slots), cores=len(slots), env=env, python=python)
            for host, slots in self.selection.chosen.items()
        ][: len(self.selection.chosen) - self.launch.spares]
        alone = "127.0.0.1" if len(specs) == 1 else specs[0].host
        return self._make(specs, self.launch.master_addr or alone, self.launch.master_port, 0)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Return the numbers of workers with every choice of hosts that the options allow."""
        slots = tuple(len(each) for each in (self.selection.chosen or {}).values() if each)
        if not slots:
            return ()
        spares = min(self.launch.spares, len(slots) - 1)
        return possible_world_sizes(slots, spares, self.launch.min_nodes)

    def _make(
        self, specs: Sequence[NodeSpec], address: str, port: int, attempt: int, *, safe_path: bool = True
    ) -> Plan:
        """Make a plan; `safe_path`: the nodes' Pythons know -P, which hides the working folder."""
        safe = ["-P"] if safe_path else []
        bootstrap = (sys.executable, *safe, "-m", "zlaunch.node.bootstrap")
        run = replace(self.run, bootstrap=bootstrap, world_sizes=self.world_sizes)
        port = port or agreed_port(f"{self.launch.run_id}.{attempt}")
        return self.make_plan(specs, address, port, attempt, run=run)

    def _spec(self, node: Node, interface: str) -> NodeSpec:
        """Describe a node that has answered. Raises NodeError when it does not have what was asked for."""
        from zlaunch import __version__

        facts = node.facts
        slots = self._chosen()[node.host]
        launch = self.launch
        if facts.version != __version__:
            raise NodeError(
                node.host, f"zlaunch {facts.version} there, {__version__} here: install the same version"
            )
        if facts.devices and (missing := tuple(slot for slot in slots if slot >= len(facts.devices))):
            raise NodeError(
                node.host, f"slot {missing[-1]} was asked for, but it has {facts.describe_devices()}", missing
            )
        near = [facts.near[slot] for slot in slots] if facts.devices else []
        env = dict(self.environ)
        if interface and "GLOO_SOCKET_IFNAME" not in env:
            env["GLOO_SOCKET_IFNAME"] = interface
        if launch.iface and "NCCL_SOCKET_IFNAME" not in env:
            env["NCCL_SOCKET_IFNAME"] = launch.iface
        return NodeSpec(
            node.host,
            workers=len(slots),
            cores=len(flat(facts.cores)),
            devices=tuple(facts.devices[slot] for slot in slots) if facts.devices else (),
            slots=tuple(slots) if facts.devices else (),
            env=env,
            bound=launch.bound_cores(facts.cores, near, len(slots), node.host),
            shares_cores=launch.shares_cores,
            python=launch.python,
            is_local=node.link.transport.local,
        )

    def _chosen(self) -> dict[str, tuple[int, ...]]:
        assert self.selection.chosen is not None
        return self.selection.chosen


# -- openmpi ----------------------------------------------------------------------------------------
#
# Run on the hosts of a hostfile, each reached by Open MPI's mpirun.


class OpenMpiLauncher(ClusterLauncher):
    """Starts one mpirun for each host."""

    name = "openmpi"

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a host. Raises NodeError."""
        from zlaunch.transports.local import mpirun_prefix, open_command

        return open_command(host, mpirun_prefix(host), self.launch.python, self.agent_log(host))
