"""Describe this machine, without torch and without touching a GPU: its slots, facts and memory.

Slot i is the i-th device that CUDA would show to a process started here.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zlaunch import __version__
from zlaunch.system.cores import Cores, cpus_near, usable_cores
from zlaunch.system.network import interface_addresses
from zlaunch.system.processes import start_ticks

# -- devices ----------------------------------------------------------------------------------------


_UUID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class Devices:
    """Holds the visible devices as CUDA_VISIBLE_DEVICES tokens; none of them means CPU workers."""

    tokens: tuple[str, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES as it was given from outside, for messages."""

    def describe(self) -> str:
        """Say how many devices there are, and what hides the others if something does."""
        count = len(self.tokens)
        text = f"{count} GPU{'' if count == 1 else 's'}"
        return text if self.visible is None else f"{text} (CUDA_VISIBLE_DEVICES={self.visible})"


def discover(
    environ: Mapping[str, str],
    *,
    proc: Path = Path("/proc/driver/nvidia/gpus"),
    dev: Path = Path("/dev"),
    wsl: Path = Path("/usr/lib/wsl/lib"),
) -> Devices:
    """Count the GPUs of this machine and apply CUDA_VISIBLE_DEVICES by CUDA's own rules."""
    # Device files may not exist before the first use, and a container may see the host's /proc: the smaller
    # count that is not zero is the one a process here can open.
    counts = (
        sum(1 for _ in proc.iterdir()) if proc.is_dir() else 0,
        sum(1 for _ in dev.glob("nvidia[0-9]*")),
    )
    physical = min((count for count in counts if count), default=0)
    if not physical and (dev / "dxg").exists() and (wsl / "libcuda.so.1").exists():
        physical = _count_by_driver(wsl / "nvidia-smi")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Devices(tuple(map(str, range(physical))), None)
    return Devices(_visible_tokens(visible, physical), visible)


def _count_by_driver(program: Path) -> int:
    """Ask nvidia-smi for the number of GPUs, one if it cannot say: WSL 2 has one device file for all."""
    try:
        said = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in said.splitlines()))


def _visible_tokens(text: str, physical: int) -> tuple[str, ...]:
    """Return the tokens that CUDA would accept: a bad one ends the list, a repeated one empties it."""
    tokens: list[str] = []
    for token in (piece.strip() for piece in text.split(",")):
        by_index = token.isascii() and token.isdigit() and int(token) < physical
        if not by_index and not (physical and token.startswith(_UUID_PREFIXES)):
            break
        token = str(int(token)) if by_index else token
        if token in tokens:
            return ()
        tokens.append(token)
    return tuple(tokens)


def visible_for_workers(tokens: Sequence[str], *, alone: bool = False) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each worker.

    All workers of a node see one list, so that `cuda:LOCAL_RANK` is right and peers can map each other's
    memory. CUDA opens only one MIG instance in a process, so with MIG each worker sees its instance alone;
    with `alone` always.
    """
    if alone or any(token.startswith("MIG-") for token in tokens):
        return tuple(tokens)
    return (",".join(tokens),) * len(tokens)


# -- facts ------------------------------------------------------------------------------------------
#
# Gather what a node says about itself before anything is planned for it.


@dataclass(frozen=True, slots=True)
class Facts:
    """Describes one node."""

    hostname: str
    version: str
    """Version of zlaunch there."""
    python: str
    cores: Cores
    """Lists the physical cores that may be used there, sorted by NUMA node."""
    devices: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES tokens, one a GPU."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES as it is set there."""
    addresses: dict[str, tuple[str, ...]]
    """Network interface -> its addresses, for those that are up; loopback is left out."""
    debugpy: bool = False
    """Tells whether debugpy is installed there."""
    near: tuple[tuple[int, ...], ...] = ()
    """The CPUs near each GPU; none where that is unknown."""

    def as_event(self) -> dict[str, Any]:
        """Return the facts as an event, for the way to the launcher."""
        return {"type": "hello", **{name: getattr(self, name) for name in self.__slots__}}

    @staticmethod
    def from_event(event: Mapping[str, Any]) -> Facts:
        """Read what `as_event` has written."""
        return Facts(
            hostname=event["hostname"],
            version=event["version"],
            python=event["python"],
            cores=tuple(tuple(cpus) for cpus in event["cores"]),
            devices=tuple(event["devices"]),
            visible=event["visible"],
            addresses={name: tuple(values) for name, values in event["addresses"].items()},
            debugpy=event["debugpy"],
            near=tuple(tuple(cpus) for cpus in event["near"]),
        )

    def describe_devices(self) -> str:
        """Say how many GPUs there are."""
        return Devices(self.devices, self.visible).describe()


def own_facts(*, with_network: bool = True) -> Facts:
    """Return the facts of this machine, as this process may use it."""
    found = discover(os.environ)
    return Facts(
        hostname=socket.gethostname(),
        version=__version__,
        python=platform.python_version(),
        cores=usable_cores(),
        devices=found.tokens,
        visible=found.visible,
        addresses=interface_addresses() if with_network else {},
        debugpy=has_debugpy(),
        near=cpus_near(found.tokens, os.environ),
    )


def has_debugpy() -> bool:
    """Tell whether workers of this Python can be debugged."""
    return importlib.util.find_spec("debugpy") is not None


# -- memory -----------------------------------------------------------------------------------------
#
# Name and remove the folder in this machine's memory that the workers of all attempts share.


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
    name = f"zlaunch-memory-{_space()}-{watchdog}-{start_ticks(watchdog) or 0}-{os.urandom(8).hex()}"
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
