"""Run on this machine alone."""

from __future__ import annotations

import os
import shutil
from functools import cached_property

from zlaunch.errors import LaunchError, NodeError
from zlaunch.hostfiles import filters
from zlaunch.launchers.base import FOR_SEVERAL_NODES, NEEDS_NODES
from zlaunch.launchers.this_node import ThisNodeLauncher
from zlaunch.plan.facts import NodeSpec
from zlaunch.plan.options import own_names
from zlaunch.plan.plan import Plan
from zlaunch.system.devices import Devices, discover


class LocalLauncher(ThisNodeLauncher):
    """Runs on the slots of this machine that --num_gpus or a filter has chosen."""

    name = "local"
    refuses = dict.fromkeys(FOR_SEVERAL_NODES, NEEDS_NODES)

    def own_plan(self, attempt: int) -> Plan:
        """Make the plan of an attempt, with a port that is free now. Raises LaunchError."""
        from zlaunch.plan.checks import pick_port

        o, node = self.options, self._node
        if not os.path.isdir(o.workdir):
            raise LaunchError(f"--workdir {o.workdir}: there is no such folder")
        return self.make_plan([node], o.master_addr or "127.0.0.1", pick_port(o.master_port), attempt)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Return the slots that were chosen. Raises LaunchError."""
        o = self.options
        if o.num_nodes not in (None, 1):
            has_slurm = self.allocation is None and shutil.which("salloc") is not None
            advice = ", or use `zlaunch slurm submit` or salloc" if has_slurm else ""
            said = f"this is the only machine; give a --hostfile{advice}"
            raise LaunchError(f"--num_nodes {o.num_nodes}: {said}")
        if o.num_gpus is not None and (o.include is not None or o.exclude is not None):
            raise LaunchError("--num_gpus cannot be combined with --include or --exclude")
        devices, count = self._devices, len(self._devices.tokens)
        option, text = ("--include", o.include) if o.include is not None else ("--exclude", o.exclude)
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
        if o.num_gpus is not None and count and o.num_gpus > count:
            raise LaunchError(f"--num_gpus {o.num_gpus}: this machine has {devices.describe()}")
        # as on several nodes of a SLURM job: a job is planned the same whatever is visible
        granted = 0 if self.allocation is None else self.allocation.nodes[0].gpus or 0
        return tuple(range(o.num_gpus or count or granted or 1))

    @cached_property
    def _devices(self) -> Devices:
        return discover(os.environ)

    @cached_property
    def _node(self) -> NodeSpec:
        return self.spec("localhost", self.slots, self._devices.tokens, self.options.worker_env)


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
