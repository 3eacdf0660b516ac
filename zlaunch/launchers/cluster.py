"""Runs on the hosts of a hostfile or of a SLURM allocation."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zlaunch.hostfiles import filters
from zlaunch.launch.run_record import resume_folder
from zlaunch.launchers.local import open_local
from zlaunch.plan.options import DEFAULT_HOSTFILE, Launcher, Options, bound_cores, own_names, quiet_port
from zlaunch.plan.plan import NodeSpec, Plan, make_plan
from zlaunch.system.processes import python_module_argv

if TYPE_CHECKING:
    from zlaunch.hostfiles.grammar import HostEntry
    from zlaunch.launch.job import Job
    from zlaunch.launch.nodes import Link, Node, NodeError, Rendezvous, Say
    from zlaunch.slurm.environment import Allocation


@dataclass(slots=True)
class Cluster:
    """The hosts that a hostfile or an allocation names, and the slots that were chosen."""

    options: Options
    launcher: Launcher
    entries: dict[str, HostEntry]
    cpus: dict[str, int | None]
    environ: Mapping[str, str]
    """What is exported to the nodes."""
    safe_path: bool = True
    """The nodes' Pythons know -P: files in the working folder cannot get in the way of the start."""
    chosen: filters.Pool | None = None
    """Host -> slots; None while some hosts' slots have to be asked for."""

    def hosts(self) -> tuple[str, ...]:
        """Whom to connect to."""
        return tuple(self.chosen if self.chosen is not None else self._named())

    def _named(self) -> list[str]:
        """The hosts that the filters leave, whatever their slots."""
        o = self.options
        names = list(self.entries)
        if o.include is not None:
            wanted = _parse("--include", o.include)
            _check_known(wanted, names, "--include", o.include)
            names = [host for host in names if host in wanted]
        if o.exclude is not None:
            unwanted = _parse("--exclude", o.exclude)
            _check_known(unwanted, names, "--exclude", o.exclude)
            names = [host for host in names if unwanted.get(host, frozenset()) is not None]
        if o.num_nodes is not None:
            if o.num_nodes > len(names):
                raise click.UsageError(f"--num_nodes {o.num_nodes}: there are {len(names)} hosts")
            names = names[: o.num_nodes]
        return names

    def settle(self, found: Mapping[str, int] = {}) -> None:
        """Apply the filters, if every host's slots are known by now: written down, or found there."""
        pool = {}
        for host in self._named():
            slots = self.entries[host].slots if self.entries[host].slots is not None else found.get(host)
            if slots is None:
                return
            pool[host] = tuple(range(slots))
        o = self.options
        option, text = ("--include", o.include) if o.include is not None else ("--exclude", o.exclude)
        try:
            if o.include is not None:
                pool = filters.include(pool, filters.parse(o.include))
            elif o.exclude is not None:
                kept = {h: s for h, s in filters.parse(o.exclude).items() if h in pool}
                pool = filters.exclude(pool, kept)
        except filters.FilterError as error:
            raise click.UsageError(f"{option} {text!r}: {error}") from None
        try:
            self.chosen = filters.limit(pool, None, o.num_gpus)
        except filters.FilterError as error:
            raise click.UsageError(str(error)) from None

    # -- agents

    def open_link(self, host: str) -> Link:
        """Start the agent of a host. Raises NodeError."""
        from zlaunch.launch.nodes import Link
        from zlaunch.transports.command import mpirun_prefix, open_command, srun_prefix

        entry, o = self.entries[host], self.options
        if self.launcher in ("slurm", "openmpi"):
            prefix = (
                srun_prefix(host, self.cpus.get(host)) if self.launcher == "slurm" else mpirun_prefix(host)
            )
            argv = (o.python, *python_module_argv("zlaunch.node.agent")[1:])
            return Link(open_command(host, prefix, argv, Path(o.run_dir, "logs", f"agent_{host}.log")))
        if host in own_names() and entry.user is None and entry.port is None:
            return open_local(o, host)
        from zlaunch.transports.ssh_config import resolve

        port = entry.port if entry.port is not None else o.ssh_port
        settings = resolve(host, user=entry.user, port=port, config=o.ssh_config)
        from zlaunch.transports.ssh import AuthenticationRefused, open_ssh

        if self.launcher == "openssh" or settings.needs_openssh:
            return self._open_by_program(entry, port, settings.timeout_s)
        try:
            return Link(open_ssh(settings, o.python, accept_new=o.ssh_accept_new))
        except AuthenticationRefused:
            if not settings.gssapi:
                raise
            return self._open_by_program(entry, port, settings.timeout_s)

    def _open_by_program(self, entry: HostEntry, port: int | None, timeout_s: float) -> Link:
        from zlaunch.launch.nodes import Link
        from zlaunch.transports.openssh import open_openssh
        from zlaunch.transports.ssh import remote_command

        o = self.options
        return Link(
            open_openssh(
                entry.host,
                remote_command(o.python),
                Path(o.run_dir, "logs", f"agent_{entry.host}.log"),
                user=entry.user,
                port=port,
                config=o.ssh_config,
                accept_new=o.ssh_accept_new,
                timeout_s=timeout_s,
            )
        )

    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        """Start agents, ask for what is not known yet, and let go of nodes that the filters leave out."""
        from zlaunch.launch.nodes import close_all, connect

        if self.launcher == "ssh":  # it takes a while, in which `ssh` is asked about the hosts
            threading.Thread(target=import_module, args=("paramiko",), daemon=True).start()
        nodes, errors = connect(hosts, self.open_link, self.options.connect_timeout_s, say)
        if not nodes:
            return [], errors
        if self.chosen is None:
            found = {node.host: len(node.facts.devices) or 1 for node in nodes}
            self.settle({**dict.fromkeys((error.host for error in errors), 0), **found})
        assert self.chosen is not None
        unused = [node for node in nodes if node.host not in self.chosen]
        close_all(unused)
        return [node for node in nodes if node.host in self.chosen], errors

    def sweep(self, hosts: Sequence[str], run_id: str) -> None:
        """End what is left of a run on hosts whose agents have died."""
        from zlaunch.launch.nodes import sweep_hosts

        sweep_hosts(hosts, self.open_link, run_id)

    # -- the plan

    def spec(self, node: Node, interface: str) -> NodeSpec:
        """What runs on a node that has answered. Raises NodeError when it does not have what was asked."""
        from zlaunch import __version__
        from zlaunch.launch.nodes import NodeError

        assert self.chosen is not None
        facts, slots, o = node.facts, self.chosen[node.host], self.options
        if facts.version != __version__:
            raise NodeError(
                node.host, f"zlaunch {facts.version} there, {__version__} here: install the same version"
            )
        if facts.devices and slots[-1] >= len(facts.devices):
            raise NodeError(
                node.host, f"slot {slots[-1]} was asked for, but it has {facts.describe_devices()}"
            )
        env = dict(self.environ)
        if interface and "GLOO_SOCKET_IFNAME" not in env:
            env["GLOO_SOCKET_IFNAME"] = interface
        if o.iface and "NCCL_SOCKET_IFNAME" not in env:
            env["NCCL_SOCKET_IFNAME"] = o.iface
        return NodeSpec(
            node.host,
            workers=len(slots),
            cores=len(facts.cores),
            devices=tuple(facts.devices[slot] for slot in slots) if facts.devices else (),
            env=env,
            bound=bound_cores(o, facts.cores, len(slots), node.host),
            python=o.python,
        )

    def plan(self, nodes: Sequence[Node], meet: Rendezvous | None, attempt: int) -> Plan:
        """The plan for the nodes that are there."""
        interfaces = meet.interfaces if meet is not None else ("",) * len(nodes)
        versions = [tuple(map(int, node.facts.python.split(".")[:2])) for node in nodes]
        self.safe_path = all(version >= (3, 11) for version in versions)
        specs = [self.spec(node, interface) for node, interface in zip(nodes, interfaces, strict=True)]
        o = self.options
        if meet is None:  # a single node, which may be one of a larger run that somebody else puts together
            address, port = o.master_addr or "127.0.0.1", o.master_port
        else:
            address, port = meet.address, meet.port
        return self.make(specs, address, port, attempt)

    def known_plan(self) -> Plan:
        """The plan as it will be, but for what only the nodes can tell: cores, devices, the rendezvous."""
        assert self.chosen is not None
        specs = [
            NodeSpec(
                host, workers=len(slots), cores=len(slots), env=dict(self.environ), python=self.options.python
            )
            for host, slots in self.chosen.items()
        ]
        alone = "127.0.0.1" if len(specs) == 1 else specs[0].host
        return self.make(specs, self.options.master_addr or alone, self.options.master_port)

    def make(self, specs: Sequence[NodeSpec], address: str, port: int, attempt: int = 0) -> Plan:
        """A plan from what is known."""
        o = self.options
        return make_plan(
            o.target,
            specs,
            run_id=o.run_id,
            run_dir=o.run_dir,
            master_addr=address,
            master_port=port or quiet_port(f"{o.run_id}.{attempt}"),
            cwd=o.workdir,
            grace_s=o.grace_s,
            bootstrap=(sys.executable, *(["-P"] if self.safe_path else []), "-m", "zlaunch.node.bootstrap"),
            environ=self.environ,
            heartbeat_s=o.heartbeat_s,
            restart_count=attempt,
            resume_dir=resume_folder(o.run_dir, o.run_id, attempt, o.target, os.environ),
        )

    def job(self, min_nodes: int | None) -> Job:
        """All of it for `run_job`. Raises click.UsageError."""
        if min_nodes is not None and min_nodes > len(self.hosts()):
            raise click.UsageError(f"--min_nodes {min_nodes}: there are {len(self.hosts())} hosts")
        from zlaunch.launch.job import Job

        o = self.options
        return Job(
            run_dir=o.run_dir,
            hosts=self.hosts(),
            connect=self.connect,
            plan=self.plan,
            sweep=self.sweep,
            master_addr=o.master_addr,
            master_port=o.master_port,
            iface=o.iface,
        )


def _parse(option: str, text: str) -> filters.Selection:
    try:
        return filters.parse(text)
    except filters.FilterError as error:
        raise click.UsageError(f"{option} {text!r}: {error}") from None


def _check_known(selection: filters.Selection, names: Sequence[str], option: str, text: str) -> None:
    try:
        filters.include(dict.fromkeys(names, (0,)), dict.fromkeys(selection))
    except filters.FilterError as error:
        raise click.UsageError(f"{option} {text!r}: {error}") from None


def cluster(options: Options, launcher: Launcher, allocation: Allocation | None) -> Cluster:
    """The hosts of a hostfile or an allocation. Raises click.UsageError."""
    from zlaunch.hostfiles.grammar import HostEntry, HostfileError, read
    from zlaunch.plan.env import exported

    cpus: dict[str, int | None] = {}
    if launcher == "slurm":
        assert allocation is not None
        entries = [HostEntry(node.host, slots=node.gpus or options.num_gpus) for node in allocation.nodes]
        cpus = {node.host: node.cpus for node in allocation.nodes}
    else:
        path = options.hostfile or DEFAULT_HOSTFILE
        if options.hostfile is None and not os.path.isfile(path):
            raise click.UsageError(f"--launcher {launcher} needs a --hostfile")
        try:
            entries = read(path)
        except HostfileError as error:
            raise click.UsageError(str(error)) from None
    if options.num_gpus is not None:  # CPU workers: as many as asked for
        entries = [entry if entry.slots else replace(entry, slots=options.num_gpus) for entry in entries]
    environ = exported(os.environ) | options.worker_env
    found = Cluster(options, launcher, {entry.host: entry for entry in entries}, cpus, environ)
    found.settle()
    return found
