"""Measures the free memory of this machine, as far as this process may take it. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def host_bytes() -> int:
    """Return the bytes that the system, and every control group around this process, still have."""
    free = int(psutil.virtual_memory().available)
    for folder in _own_groups():
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            cached = _statistic(folder / "memory.stat", "inactive_file")
            free = min(free, max(0, limit - used + cached))
    return free


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
