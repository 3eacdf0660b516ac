"""Gather what a node says about itself before anything is planned for it."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zlaunch import __version__
from zlaunch.system.devices import Devices, discover
from zlaunch.system.network import interface_addresses


@dataclass(frozen=True, slots=True)
class Facts:
    """Describes one node."""

    hostname: str
    version: str
    """Version of zlaunch there."""
    python: str
    cores: tuple[int, ...]
    """The CPUs that may be used there, those of one NUMA node side by side."""
    devices: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES tokens, one a GPU."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES as it is set there."""
    addresses: dict[str, tuple[str, ...]]
    """Network interface -> its addresses, for those that are up; loopback is left out."""
    debugpy: bool = False
    """Tells whether debugpy is installed there."""

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
            cores=tuple(event["cores"]),
            devices=tuple(event["devices"]),
            visible=event["visible"],
            addresses={name: tuple(values) for name, values in event["addresses"].items()},
            debugpy=event["debugpy"],
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
        cores=cores_by_numa(),
        devices=found.tokens,
        visible=found.visible,
        addresses=interface_addresses() if with_network else {},
        debugpy=has_debugpy(),
    )


def has_debugpy() -> bool:
    """Tell whether workers of this Python can be debugged."""
    return importlib.util.find_spec("debugpy") is not None


def cores_by_numa(root: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    """Return the CPUs of this process's affinity, ordered by NUMA node and number."""
    allowed = os.sched_getaffinity(0)
    order: dict[int, int] = {}
    for folder in root.glob("node[0-9]*"):
        for entry in folder.glob("cpu[0-9]*"):
            order[int(entry.name[3:])] = int(folder.name[4:])
    return tuple(sorted(allowed, key=lambda cpu: (order.get(cpu, 0), cpu)))
