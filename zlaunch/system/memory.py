"""Name and remove the folder in this machine's memory that the workers of all attempts share."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from zlaunch.system.processes import start_ticks

_ROOT = Path("/dev/shm")
_NAME = re.compile(r"zlaunch-memory-(?P<space>\d+)-(?P<pid>\d+)-(?P<ticks>\d+)")


def _space() -> int:
    """Return the number of this process's space of process ids."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def folder_of(watchdog: int) -> str:
    """Return the folder that belongs to the agent under a watchdog; whoever needs it makes it."""
    return str(_ROOT / f"zlaunch-memory-{_space()}-{watchdog}-{start_ticks(watchdog) or 0}")


def remove(folder: str) -> None:
    """Remove such a folder, and those whose watchdogs have been killed."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in _ROOT.glob("zlaunch-memory-*"):
        found = _NAME.fullmatch(path.name)
        if found is None or int(found["space"]) != _space():
            continue
        if start_ticks(int(found["pid"])) != int(found["ticks"]):
            shutil.rmtree(path, ignore_errors=True)
