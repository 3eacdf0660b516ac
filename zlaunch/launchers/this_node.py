"""Run the workers of this machine alone: the base of the launchers that start nothing elsewhere."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zlaunch.errors import LaunchError, NodeError
from zlaunch.launchers.base import NEEDS_DEBUGPY, Launcher
from zlaunch.plan.facts import NodeSpec
from zlaunch.plan.options import Options
from zlaunch.plan.plan import Plan
from zlaunch.supervisor.nodes import SLOW_S, Link, Node
from zlaunch.system.facts import has_debugpy
from zlaunch.transports.local import open_local

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation
    from zlaunch.supervisor.nodes import Left, Rendezvous, Say


class ThisNodeLauncher(Launcher):
    """Runs the workers of this machine alone; its plan is known before its agent has answered."""

    def __init__(self, options: Options, allocation: Allocation | None) -> None:
        """Make the plan of the first attempt. Raises LaunchError."""
        super().__init__(options, allocation)
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
        return f"{node.host}: {len(node.workers)} {kind} worker{plural}"

    def known_plan(self) -> Plan:
        """Return the plan of the first attempt."""
        return self.first_plan

    def connect(self, hosts: Sequence[str], say: Say) -> tuple[list[Node], list[NodeError]]:
        """Start the agent, once the rendezvous address is known to the network."""
        from zlaunch.system.facts import own_facts

        o = self.options
        try:
            if o.master_addr is not None:
                _await_address(o.master_addr, o.connect_timeout_s, say)
            link = Link(open_local("localhost", self.agent_log("localhost")))
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

    def sweep(self, lost: Mapping[str, Left], run_id: str) -> frozenset[str]:
        """Do nothing: the launcher itself sees to what is left on its machine."""
        return frozenset(lost)

    def spec(
        self, host: str, slots: Sequence[int], tokens: Sequence[str], env: Mapping[str, str]
    ) -> NodeSpec:
        """Describe this machine with the chosen slots; `tokens` are its GPUs, none for CPU workers."""
        from zlaunch.system.facts import cores_by_numa

        cores = cores_by_numa()
        return NodeSpec(
            host,
            workers=len(slots),
            cores=len(cores),
            devices=tuple(tokens[slot] for slot in slots) if tokens else (),
            slots=tuple(slots) if tokens else (),
            env=env,
            bound=self.options.bound_cores(cores, len(slots), host),
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
