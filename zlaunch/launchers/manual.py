"""Run one node's part, where the user, accelerate or Kubernetes starts one command on every node."""

from __future__ import annotations

import os

from zlaunch.errors import LaunchError
from zlaunch.hostfiles import grammar
from zlaunch.launchers.base import FOR_SEVERAL_NODES
from zlaunch.launchers.selection import HostSelection
from zlaunch.launchers.this_node import ThisNodeLauncher
from zlaunch.plan.plan import Part, Plan
from zlaunch.system.devices import discover

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
        o, slots = self.options, self._slots()
        rank = o.node_rank or 0
        if not 0 <= rank < len(slots):
            raise LaunchError(f"--node_rank {rank}: there are {len(slots)} nodes, 0 to {len(slots) - 1}")
        (host, own), tokens = slots[rank], discover(os.environ).tokens
        if tokens and own[-1] >= len(tokens):
            raise LaunchError(f"slot {own[-1]} does not exist: this node has {len(tokens)} GPU(s)")
        env = o.worker_env
        if o.iface:
            env |= {"GLOO_SOCKET_IFNAME": o.iface, "NCCL_SOCKET_IFNAME": o.iface}
        counts = [len(chosen) for _, chosen in slots]
        return self.make_plan(
            [self.spec(host, own, tokens, env)],
            o.master_addr or slots[0][0],
            o.master_port or _PORT,
            attempt,
            part=Part(sum(counts[:rank]), sum(counts), rank, len(counts)),
        )

    def _slots(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return every node's slots, in order."""
        o = self.options
        if o.hostfile is None:
            if o.num_nodes is None or o.master_addr is None:
                raise LaunchError("--no_ssh needs a --hostfile with slots, or --num_nodes and --master_addr")
            # Every node has as many as this one: with other numbers the ranks would not fit together.
            count = o.num_gpus or len(discover(os.environ).tokens) or 1
            return [(f"node{index}", tuple(range(count))) for index in range(o.num_nodes)]
        chosen = HostSelection(o, grammar.read(o.hostfile)).chosen
        if chosen is None:
            raise LaunchError(f"--no_ssh: {o.hostfile} needs slots=N for every host")
        return list(chosen.items())
