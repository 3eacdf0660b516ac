"""Run the workers of this machine alone: as the only node, or as one of several that are started by hand."""

from __future__ import annotations

import os
import shutil
import socket
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from zlaunch.errors import LaunchError, NodeError
from zlaunch.hostfiles import filters, grammar
from zlaunch.launchers.base import (
    ASK_FOR_MORE,
    FOR_SEVERAL_NODES,
    NEEDS_DEBUGPY,
    NEEDS_NODES,
    HostSelection,
    Launcher,
    check_granted,
)
from zlaunch.plan.options import Launch, own_names
from zlaunch.plan.plan import NodeSpec, NodeSubset, Plan, shown_host
from zlaunch.supervisor.nodes import SLOW_S, AgentConnection, Node
from zlaunch.system.cores import cpus_near, flat, usable_cores
from zlaunch.system.machine import Devices, discover, has_debugpy
from zlaunch.transports.local import open_local

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation
    from zlaunch.supervisor.nodes import LostNodeProcesses, Rendezvous, Say


# -- this node --------------------------------------------------------------------------------------


class ThisNodeLauncher(Launcher):
    """Runs the workers of this machine alone; its plan is known before its agent has answered."""

    def __init__(self, launch: Launch, allocation: Allocation | None) -> None:
        """Make the plan of the first attempt. Raises LaunchError."""
        super().__init__(launch, allocation)
        self.first_plan = self.own_plan(0)
        if self.lacks_debugger(self.first_plan.nodes[0], is_there=has_debugpy()):
            raise LaunchError(NEEDS_DEBUGPY)

    @abstractmethod
    def own_plan(self, attempt: int) -> Plan:
        """Make this machine's plan of an attempt. Raises LaunchError."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return this machine's name for itself."""
        return ("localhost",)

    @property
    def where(self) -> str:
        """Return this machine and its workers."""
        node = self.first_plan.nodes[0]
        kind = "GPU" if node.workers[0].env.get("CUDA_VISIBLE_DEVICES") else "CPU"
        plural = "s" if len(node.workers) > 1 else ""
        return f"{shown_host(node.host)}: {len(node.workers)} {kind} worker{plural}"

    def known_plan(self) -> Plan:
        """Return the plan of the first attempt."""
        return self.first_plan

    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        """Start the agent, once the rendezvous address is known to the network."""
        from zlaunch.system.machine import own_facts

        launch = self.launch
        try:
            if launch.master_addr is not None:
                _await_address(launch.master_addr, launch.connect_timeout_s, say)
            link = AgentConnection(open_local("localhost", self.agent_log("localhost")))
        except NodeError as error:
            return [], [error]
        return [Node(link, own_facts(with_network=False))], []

    def gpus_of(self, node: Node) -> Sequence[str]:
        """Return the GPUs that the workers see."""
        workers = self.first_plan.nodes[0].workers
        visible = [worker.env.get("CUDA_VISIBLE_DEVICES", "").split(",") for worker in workers]
        return tuple(dict.fromkeys(token for tokens in visible for token in tokens if token))

    def plan(self, nodes: Sequence[Node], rendezvous: Rendezvous | None, attempt: int) -> Plan:
        """Return this machine's plan of an attempt."""
        return self.first_plan if attempt == 0 else self.own_plan(attempt)

    def kill_leftovers(self, lost: Mapping[str, LostNodeProcesses], run_id: str) -> frozenset[str]:
        """Do nothing: the launcher itself sees to what is left on its machine."""
        return frozenset(lost)

    def spec(
        self, host: str, slots: Sequence[int], tokens: Sequence[str], env: Mapping[str, str]
    ) -> NodeSpec:
        """Describe this machine with the chosen slots; `tokens` are its GPUs, none for CPU workers."""
        cores = usable_cores()
        chosen = [tokens[slot] for slot in slots] if tokens else []
        return NodeSpec(
            host,
            workers=len(slots),
            cores=len(flat(cores)),
            devices=tuple(chosen),
            slots=tuple(slots) if tokens else (),
            env=env,
            bound=self.launch.bound_cores(cores, cpus_near(chosen, os.environ), len(slots), host),
            shares_cores=self.launch.shares_cores,
        )


def _await_address(host: str, timeout_s: float, say: Say) -> None:
    """Wait until a name has an address: a pod's may come a little after the pod. Raises NodeError."""
    started = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            say("", 0.0)
            return
        except (OSError, UnicodeError) as error:
            now = time.monotonic()
            if now - started >= timeout_s:
                say("", 0.0)
                text = f"--master_addr {host} has no address: {error}; looked for {timeout_s:g} s"
                raise NodeError(host, text) from None
            if now - started >= SLOW_S:
                say(f"an address of {host}", now - started)
            time.sleep(min(0.5, timeout_s))


# -- local ------------------------------------------------------------------------------------------
#
# Run on this machine alone.


class LocalLauncher(ThisNodeLauncher):
    """Runs on the slots of this machine that --num_gpus or a filter has chosen."""

    name = "local"
    refuses = dict.fromkeys(FOR_SEVERAL_NODES, NEEDS_NODES)

    def own_plan(self, attempt: int) -> Plan:
        """Make the plan of an attempt, with a port that is free now. Raises LaunchError."""
        from zlaunch.plan.checks import pick_port

        launch = self.launch
        node = self._node
        if not os.path.isdir(launch.workdir):
            raise LaunchError(f"--workdir {launch.workdir}: there is no such folder")
        port = pick_port(launch.master_port)
        return self.make_plan([node], launch.master_addr or "127.0.0.1", port, attempt)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Return the slots that were chosen. Raises LaunchError."""
        launch = self.launch
        if launch.num_nodes not in (None, 1):
            has_slurm = self.allocation is None and shutil.which("salloc") is not None
            advice = ", or use `zlaunch slurm submit` or salloc" if has_slurm else ""
            said = f"this is the only machine; give a --hostfile{advice}"
            if self.allocation is not None:
                said = f"the SLURM job has 1 node; {ASK_FOR_MORE}"
            raise LaunchError(f"--num_nodes {launch.num_nodes}: {said}")
        if launch.num_gpus is not None and (launch.include is not None or launch.exclude is not None):
            raise LaunchError("--num_gpus cannot be combined with --include or --exclude")
        devices = self._devices
        count = len(self._devices.tokens)
        option, text = "--include", launch.include
        if text is None:
            option, text = "--exclude", launch.exclude
        if text is not None:
            hidden = f"; CUDA_VISIBLE_DEVICES={devices.visible}" if devices.visible is not None else ""
            try:
                selection = filters.parse(text)
                if missing := _missing_slots(selection, count):
                    said = f"{option} {text!r}: no slot {missing[0]}: this machine has {devices.describe()}"
                    raise NodeError("localhost", said, missing)
                return _chosen_slots(selection, count, keep=option == "--include")
            except filters.FilterError as error:
                raise LaunchError(f"{option} {text!r}: {error}{hidden}") from None
        if launch.num_gpus is not None and count and launch.num_gpus > count:
            raise LaunchError(f"--num_gpus {launch.num_gpus}: this machine has {devices.describe()}")
        # as on several nodes of a SLURM job: a job is planned the same whatever is visible
        granted = 0 if self.allocation is None else self.allocation.nodes[0].gpus or 0
        check_granted(launch, granted, devices.tokens)
        return tuple(range(launch.num_gpus or count or granted or 1))

    @cached_property
    def _devices(self) -> Devices:
        return discover(os.environ)

    @cached_property
    def _node(self) -> NodeSpec:
        return self.spec("localhost", self.slots, self._devices.tokens, self.launch.worker_env)


def _missing_slots(selection: filters.Selection, gpus: int) -> tuple[int, ...]:
    """Return the slots of this machine that a filter names, and that have no GPU; none without GPUs."""
    named = {slot for host in own_names() & selection.keys() for slot in selection[host] or ()}
    return tuple(sorted(slot for slot in named if gpus and slot >= gpus))


def _chosen_slots(selection: filters.Selection, gpus: int, *, keep: bool) -> tuple[int, ...]:
    """Return the slots of this machine that a filter keeps, or leaves. Raises FilterError."""
    own = own_names()
    merged: filters.Selection = {}
    for host, slots in selection.items():
        if host not in own:
            raise filters.FilterError(
                f"unknown host {host!r}: without a hostfile only localhost can be chosen"
            )
        known = merged.get("localhost", frozenset())
        merged["localhost"] = None if slots is None or known is None else known | slots
    # Without GPUs a slot is a CPU worker, and there are as many as are named.
    named = [slot for chosen in merged.values() for slot in chosen or ()]
    pool = {"localhost": tuple(range(gpus or max(named, default=0) + 1))}
    return (filters.include if keep else filters.exclude)(pool, merged)["localhost"]


# -- manual -----------------------------------------------------------------------------------------
#
# Run one node's part, where the user, accelerate or Kubernetes starts one command on every node.


_PORT = 29500
"""Where all meet without --master_port, as in DeepSpeed: nobody can tell the others of a free one."""
_KNOWS_NO_OTHER = "nodes that you start yourself cannot act together: remove it, or use --hostfile"


class ManualLauncher(ThisNodeLauncher):
    """Runs the part of node --node_rank; every node computes equal numbers from an equal command line."""

    name = "hand"
    refuses = dict.fromkeys(
        (*(option for option in FOR_SEVERAL_NODES if option != "iface"), "max_restarts"), _KNOWS_NO_OTHER
    )
    shares_run_dir = True

    def own_plan(self, attempt: int) -> Plan:
        """Make this node's part of the plan. Raises LaunchError."""
        launch = self.launch
        slots = self._slots()
        rank = launch.node_rank or 0
        if not 0 <= rank < len(slots):
            raise LaunchError(f"--node_rank {rank}: there are {len(slots)} nodes, 0 to {len(slots) - 1}")
        host, own = slots[rank]
        tokens = discover(os.environ).tokens
        if tokens and own[-1] >= len(tokens):
            raise LaunchError(f"slot {own[-1]} does not exist: this node has {len(tokens)} GPU(s)")
        env = launch.worker_env
        if launch.iface:
            env |= {"GLOO_SOCKET_IFNAME": launch.iface, "NCCL_SOCKET_IFNAME": launch.iface}
        counts = [len(chosen) for _, chosen in slots]
        return self.make_plan(
            [self.spec(host, own, tokens, env)],
            launch.master_addr or slots[0][0],
            launch.master_port or _PORT,
            attempt,
            part=NodeSubset(sum(counts[:rank]), sum(counts), rank, len(counts)),
        )

    def _slots(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return every node's slots, in order."""
        launch = self.launch
        if launch.hostfile is None:
            if launch.num_nodes is None or launch.master_addr is None:
                raise LaunchError("--no_ssh needs a --hostfile with slots, or --num_nodes and --master_addr")
            # Every node has as many as this one: with other numbers the ranks would not fit together.
            count = launch.num_gpus or len(discover(os.environ).tokens) or 1
            # The names of the others are not known, and a made-up one could be another machine's.
            return [(socket.gethostname(), tuple(range(count)))] * launch.num_nodes
        chosen = HostSelection(launch, grammar.read(launch.hostfile)).chosen
        if chosen is None:
            raise LaunchError(f"--no_ssh: {launch.hostfile} needs slots=N for every host")
        return list(chosen.items())
