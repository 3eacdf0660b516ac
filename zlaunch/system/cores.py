"""Find the CPU cores that this process may use, those near each GPU, and share them out between workers.

Numbers of CPUs are Linux's: with hyper-threads a physical core has several, which often are far apart, such
as 3 and 67. Workers get whole physical cores, so that no worker computes on the other half of another one's
core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
PROC_GPUS = Path("/proc/driver/nvidia/gpus")

Cores = tuple[tuple[int, ...], ...]
"""Physical cores, each with the numbers of its CPUs."""


def flat(cores: Cores) -> tuple[int, ...]:
    """Return the CPUs of physical cores."""
    return tuple(cpu for core in cores for cpu in core)


def written(cpus: Sequence[int]) -> str:
    """Write CPUs as Linux does, such as `0-3,64-67`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def parse_cpus(text: str) -> list[int]:
    """Read what :func:`written` has written. Raises ValueError."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]


def usable_cores(sys: Path = SYS) -> Cores:
    """Return the physical cores that this process may use, sorted by NUMA node."""
    allowed = os.sched_getaffinity(0)
    node_of = {
        cpu: int(folder.name[4:])
        for folder in (sys / "devices/system/node").glob("node[0-9]*")
        for cpu in _read_cpus(folder / "cpulist")
    }
    threads: dict[int, list[int]] = {}
    for cpu in sorted(allowed):
        siblings = _read_cpus(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        threads.setdefault(min(siblings, default=cpu), []).append(cpu)
    cores = [tuple(cpus) for cpus in threads.values()]
    return tuple(sorted(cores, key=lambda core: (node_of.get(core[0], 0), core)))


def split_cores(cores: Cores, workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each worker: equal shares of physical cores, neighbours together. With fewer cores
    than workers, these share cores.
    """
    share = max(1, len(cores) // workers)
    starts = ((i * share) % len(cores) for i in range(workers))
    return tuple(flat(cores[start : start + share]) for start in starts)


def split_near(cores: Cores, near: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each worker: its share of the cores near its GPU. ``near``: the CPUs near each
    worker's GPU.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, cpus in enumerate(near):
        groups.setdefault(tuple(cpus), []).append(index)
    shares: dict[int, tuple[int, ...]] = {}
    for cpus, members in groups.items():
        here = tuple(core for core in cores if set(core) <= set(cpus))
        shares |= zip(members, split_cores(here or cores, len(members)), strict=True)
    return tuple(shares[index] for index in range(len(near)))


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Holds what the driver's files say of a GPU."""

    address: str
    """Gives the PCI address in lower case, such as 0000:3b:00.0."""
    uuid: str
    model: str
    minor: str
    """Gives the N of /dev/nvidiaN."""


def cpus_near(
    tokens: Sequence[str],
    environ: Mapping[str, str],
    *,
    sys: Path = SYS,
    proc: Path = PROC_GPUS,
    dev: Path = Path("/dev"),
) -> tuple[tuple[int, ...], ...]:
    """Return, for each GPU, the CPUs of its NUMA node that this process may use; none where that is unknown.

    ``tokens``: as in CUDA_VISIBLE_DEVICES. A number is one of CUDA's, whose order is that of the PCI
    addresses if all GPUs are of one model, or if CUDA_DEVICE_ORDER says so.
    """
    allowed = os.sched_getaffinity(0)
    gpus = _gpus(proc, dev)
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in gpus}) == 1
    found = []
    for token in tokens:
        gpu = None
        if token.isdigit():
            gpu = gpus[int(token)] if in_order and int(token) < len(gpus) else None
        else:  # CUDA takes the beginning of a UUID, too
            same = [each for each in gpus if each.uuid.startswith(token)]
            gpu = same[0] if len(same) == 1 else None
        node = -1 if gpu is None else _read_number(sys / f"bus/pci/devices/{gpu.address}/numa_node")
        cpus = _read_cpus(sys / f"devices/system/node/node{node}/cpulist") if node >= 0 else []
        found.append(tuple(cpu for cpu in cpus if cpu in allowed))
    return tuple(found)


def _gpus(proc: Path, dev: Path) -> list[_Gpu]:
    """Return the GPUs in the order of their PCI addresses, without those that this process cannot open: a
    container may see the host's /proc.
    """
    gpus = []
    for folder in sorted(proc.glob("*:*")):
        try:
            lines = (folder / "information").read_text().splitlines()
        except OSError:
            continue
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = facts.get("Device Minor", "")
        if (dev / f"nvidia{minor}").exists():
            gpus.append(_Gpu(folder.name.lower(), facts.get("GPU UUID", ""), facts.get("Model", ""), minor))
    return gpus


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _read_cpus(path: Path) -> list[int]:
    """Read a list such as `0-3,64-67`; none where the file is missing."""
    try:
        return parse_cpus(path.read_text())
    except (OSError, ValueError):
        return []
