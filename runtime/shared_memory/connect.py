"""Connects the ranks of one machine to each other."""

from __future__ import annotations

import os
import socket
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..comm.peer_memory import Identity
from .memory import SharedMemory


def _place() -> tuple[object, ...]:
    """Return a value that is equal in two processes that can share memory and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/self/ns/pid").st_ino, os.getuid()


def connect(
    rank: int,
    world_size: int,
    exchange: Callable[[object], list[object]],
    timeout_s: float,
    allowed: bool,
    describe: Callable[[int, Identity], str],
    check: Callable[[], None],
    first: int = 0,
) -> SharedMemory | None:
    """Connect all ranks of a group, or return None on every rank where they cannot share memory. Collective.

    ``exchange`` returns every rank's value, in rank order. ``rank`` counts in the group, whose ``first`` rank
    messages count from.
    """
    listener = None
    offer: object = None
    if allowed and hasattr(os, "memfd_create"):
        with suppress(OSError):
            os.close(os.memfd_create("zlaunch", os.MFD_CLOEXEC))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            name = f"zlaunch-{uuid.uuid4().hex}"
            listener.bind("\0" + name)  # an abstract name: it vanishes with the socket
            listener.listen(world_size)
            offer = (_place(), name, os.getpid())
    offers = exchange(offer)
    if any(other is None or other[0] != offers[0][0] for other in offers):  # type: ignore[index]
        if listener is not None:
            listener.close()
        return None
    assert listener is not None
    pids = {other[2]: position for position, other in enumerate(offers)}  # type: ignore[index]
    connections: dict[int, socket.socket] = {}
    with listener:
        for other in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect("\0" + offers[other][1])  # type: ignore[index]
            connections[other] = connection
        listener.settimeout(timeout_s)
        while len(connections) < world_size - 1:
            connection, _ = listener.accept()
            pid, _, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if pids.get(pid, -1) > rank:
                connections[pids[pid]] = connection
            else:
                connection.close()  # a stranger who has seen the name
    return SharedMemory(rank, connections, timeout_s, describe, check, first)
