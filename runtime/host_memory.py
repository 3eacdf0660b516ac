"""Measures the free memory of this machine, as far as this process may take it. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

PINNED_SHARE = 0.8
"""The share of the free host memory that may be page-locked: no other process can use such memory."""
_CGROUPS = Path("/sys/fs/cgroup")


def host_bytes() -> int:
    """Return the bytes that the system, the SLURM job, and every control group around this process, still
    have. Of the SLURM job, all its memory counts: not every cluster holds a job to it by a control group.
    """
    free = int(psutil.virtual_memory().available)
    free = min(free, slurm_bytes(os.environ) or free)
    for folder in _own_groups():
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            cached = _statistic(folder / "memory.stat", "inactive_file")
            free = min(free, max(0, limit - used + cached))
    return free


def slurm_bytes(environ: Mapping[str, str]) -> int | None:
    """Return the bytes that a SLURM job has on this node; None outside of one, or where it has all memory."""
    try:
        whole = int(environ.get("SLURM_MEM_PER_NODE", 0))
        each = int(environ.get("SLURM_MEM_PER_CPU", 0))
        mebibytes = whole or each * int(environ.get("SLURM_CPUS_ON_NODE", 0))
    except ValueError:
        return None
    return mebibytes << 20 if mebibytes > 0 else None


def _own_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = [_CGROUPS / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [group for folder in own for group in (folder, *folder.parents) if _CGROUPS in group.parents]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        return int(dict(map(str.split, path.read_text().splitlines()))[name])
    except (OSError, ValueError, KeyError):
        return 0
