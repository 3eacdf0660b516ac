"""Read the kernel's counters of processes that it has killed for lack of memory (oom-kill)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

OomScope = Literal["run", "host"]
"""Where a process was killed: in the control group of this process, or somewhere on the machine."""

_MACHINE = "proc/vmstat"


def oom_counters(root: Path = Path("/")) -> dict[OomScope, int]:
    """Read the oom-kill counters of this process's control group and of the machine, as far as there are any.

    A group's counter counts the processes in it only, whichever limit was met. Groups above it are not asked:
    they also count what happens to their other members.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        if not controllers:
            folder, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # A container may see its own group under another path: the nearest that is there is meant then.
        counts = [_count(folder / inner / name) for inner in (group, *group.parents)]
        own.append(next((count for count in counts if count is not None), None))
    counters: dict[OomScope, int] = {}
    if known := [count for count in own if count is not None]:
        counters["run"] = sum(known)
    if (machine := _count(root / _MACHINE)) is not None:
        counters["host"] = machine
    return counters


def _count(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def oom_rose(before: Mapping[OomScope, int], after: Mapping[OomScope, int]) -> OomScope | None:
    """Tell where a process was killed for lack of memory between two readings.

    Where the control group counts, the machine's number says nothing: it was a process of another group.
    """
    scope: OomScope = "run" if "run" in after else "host"
    return scope if after.get(scope, 0) > before.get(scope, 0) else None
