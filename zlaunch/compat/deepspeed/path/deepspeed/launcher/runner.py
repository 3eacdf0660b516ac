"""Reads hostfiles and filters for other launchers, and runs the command."""

from __future__ import annotations

import logging as _logging
import os as _os
from collections import OrderedDict
from collections.abc import Mapping

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.hostfiles import filters as _filters
from zlaunch.hostfiles import grammar as _grammar

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Return the slots of each host of a file; None, with a warning, where there is no such file.

    Raises ValueError for a file that is wrong, for one without hosts, and for a host without ``slots=``.
    """
    if not _os.path.isfile(hostfile_path):
        _logging.getLogger("DeepSpeed").warning("there is no hostfile %s: this machine alone", hostfile_path)
        return None
    slots: OrderedDict[str, int] = OrderedDict()
    for entry in _grammar.read(hostfile_path):
        if entry.slots is None:
            raise ValueError(f"{hostfile_path}:{entry.line}: {entry.host} needs slots=N")
        slots[entry.host] = entry.slots
    if not slots:
        raise ValueError(f"{hostfile_path}: names no host")
    return slots


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Return the slots of each host that ``--include`` keeps or ``--exclude`` leaves, in the pool's order.

    Args:
        resource_pool: Host -> the number of its slots.
        inclusion, exclusion: Such as ``worker-0@worker-1:0,2``; at least one is empty.

    Raises ValueError for hosts and slots that are not there, and where both are given.
    """
    if inclusion and exclusion:
        raise ValueError("inclusion and exclusion are mutually exclusive")
    pool: Mapping[str, tuple[int, ...]] = {host: tuple(range(count)) for host, count in resource_pool.items()}
    if inclusion:
        pool = _filters.include(pool, _filters.parse(inclusion))
    if exclusion:
        pool = _filters.exclude(pool, _filters.parse(exclusion))
    return OrderedDict((host, list(slots)) for host, slots in pool.items())


def main(args: list[str] | None = None) -> int:
    """Run ``zlaunch`` with these arguments."""
    from zlaunch.cli.main import main as zlaunch_main

    return zlaunch_main(args)


__getattr__ = _absent("deepspeed.launcher.runner")
