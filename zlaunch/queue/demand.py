"""Find out which slots a run needs, from the launcher that its command line has come to."""

from __future__ import annotations

import os
from dataclasses import replace

from zlaunch.errors import LaunchError
from zlaunch.launchers.base import Launcher
from zlaunch.launchers.cluster import ClusterLauncher
from zlaunch.launchers.local import LocalLauncher
from zlaunch.launchers.selection import HostSelection
from zlaunch.plan.options import own_names
from zlaunch.queue.schedule import Demand
from zlaunch.system.devices import discover

_HERE = "localhost"


def find_demand(launcher: Launcher) -> tuple[Demand, dict[str, str]]:
    """Return what a run needs, and the names that its hosts have in the hostfile: this machine is `localhost`
    in every demand. Raises LaunchError.
    """
    if isinstance(launcher, LocalLauncher):
        return _demand_here(launcher), {}
    if isinstance(launcher, ClusterLauncher):
        return _demand_of_hosts(launcher)
    raise LaunchError(
        f"the queue runs jobs on this machine or on hosts of a hostfile, not by --launcher {launcher.name}"
    )


def _demand_here(launcher: LocalLauncher) -> Demand:
    o, devices = launcher.options, discover(os.environ)
    if devices.tokens and devices.tokens != discover({}).tokens:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={devices.visible} hides GPUs, but the queue assigns GPUs by index: "
            "unset it, and choose GPUs with --include localhost:N"
        )
    count = len(devices.tokens) or len(os.sched_getaffinity(0))
    if max(launcher.slots) >= count:
        named = o.include is not None or o.exclude is not None
        asked = f"slot {max(launcher.slots)} was" if named else f"{len(launcher.slots)} slots were"
        asked += " asked for"
        raise LaunchError(
            f"{asked}, but this machine has {count}, one per core: "
            "for more, use a --hostfile with the line `localhost slots=N`"
        )
    if o.include is not None or o.exclude is not None:
        return Demand({_HERE: launcher.slots}, 1, None)
    return Demand({_HERE: tuple(range(count))}, 1, len(launcher.slots))


def _demand_of_hosts(launcher: ClusterLauncher) -> tuple[Demand, dict[str, str]]:
    o = launcher.options
    everything = HostSelection(replace(o, num_gpus=None, num_nodes=None), launcher.entries())
    if everything.chosen is None:
        unknown = ", ".join(host for host, entry in everything.entries.items() if entry.slots is None)
        raise LaunchError(f"the queue needs the number of slots: write slots=N after {unknown}")
    names: dict[str, str] = {}
    for host in everything.chosen:
        name = _HERE if host in own_names() else host
        if name in names:
            raise LaunchError(f"the hostfile names this machine twice: as {names[name]} and as {host}")
        names[name] = host
    pool = {name: everything.chosen[host] for name, host in names.items()}
    return Demand(pool, o.num_nodes or len(pool), o.num_gpus), names
