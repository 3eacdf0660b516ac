"""How much memory and disk one rank may take."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import torch

from .memory import Amounts
from .offload.place import OffloadOptions

_CGROUPS = Path("/sys/fs/cgroup")


def available(device: torch.device, offload: OffloadOptions, local_world_size: int) -> Amounts:
    """Free bytes for one of ``local_world_size`` ranks on this machine; 0 disk where no path is given."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return Amounts(
        device=free,
        host=host_bytes() // local_world_size,
        disk=disk_bytes(offload, local_world_size),
    )


def host_bytes() -> int:
    """What the system, and every control group around this process, still have."""
    free = int(psutil.virtual_memory().available)
    for folder in _own_groups():
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            cached = _statistic(folder / "memory.stat", "inactive_file")
            free = min(free, max(0, limit - used + cached))
    return free


def disk_bytes(offload: OffloadOptions, local_world_size: int) -> int:
    """Free on the smaller of the offload's drives."""
    found = []
    for path in {offload.optimizer_path, offload.parameters_path} - {None}:
        folder = Path(str(path)).absolute()
        while not folder.exists():
            folder = folder.parent
        found.append(shutil.disk_usage(folder).free // local_world_size)
    return min(found, default=0)


def _own_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    groups = []
    for path in paths:
        folder = _CGROUPS / path.lstrip("/")
        while folder != _CGROUPS and folder.is_relative_to(_CGROUPS):
            groups.append(folder)
            folder = folder.parent
    return groups


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
