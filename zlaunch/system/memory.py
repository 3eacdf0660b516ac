"""Name and remove the folder in this machine's memory that the workers of all attempts share."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from zlaunch.system.processes import start_ticks

_ROOT = Path("/dev/shm")
_NAME = re.compile(r"zlaunch-memory-(?P<space>\d+)-(?P<pid>\d+)-(?P<ticks>\d+)-[0-9a-f]+")


def _space() -> int:
    """Return the number of this process's space of process ids."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def new_folder(watchdog: int) -> str:
    """Name a folder for the agent under a watchdog; whoever needs it makes it. Other users cannot guess the
    name and make it before.
    """
    name = f"zlaunch-memory-{_space()}-{watchdog}-{start_ticks(watchdog) or 0}-{secrets.token_hex(8)}"
    return str(_ROOT / name)


def remove(folder: str) -> None:
    """Remove such a folder, and those whose watchdogs have been killed."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in _ROOT.glob("zlaunch-memory-*"):
        found = _NAME.fullmatch(path.name)
        if found is None or int(found["space"]) != _space():
            continue
        if start_ticks(int(found["pid"])) != int(found["ticks"]) and path.lstat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
