"""Find a node's interfaces and addresses, and whether an address can be reached."""

from __future__ import annotations

import errno
import socket
import time

_CONNECT_TIMEOUT_S = 6.0  # a lost first packet is sent again after 1 s, and after 3 s
"""Seconds for one address: longer than a lost packet's first repetition."""


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return IPv4 addresses before IPv6 ones; link-local IPv6 needs a zone and is of no use to others."""
    import psutil

    states = psutil.net_if_stats()
    found: dict[str, tuple[str, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        four = [e.address for e in entries if e.family == socket.AF_INET]
        six = [e.address for e in entries if e.family == socket.AF_INET6 and "%" not in e.address]
        kept = tuple(a for a in (*four, *six) if not a.startswith("127.") and a != "::1")
        if kept:
            found[name] = kept
    return found


def open_listener(port: int) -> socket.socket:
    """Listen on a port (0: a free one) of every address. Raises OSError."""
    try:
        listener = socket.socket(socket.AF_INET6)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("::", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        listener = socket.socket(socket.AF_INET)  # no IPv6 here
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
    listener.listen(512)
    return listener


def own_address_towards(address: str, port: int, token: bytes) -> str | None:
    """Connect, see that the token's owner answers, and return this end's address; None if it cannot be."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S) as connection:
            received = b""
            while len(received) < len(token) and time.monotonic() < deadline:
                chunk = connection.recv(len(token) - len(received))
                if not chunk:
                    break
                received += chunk
            return str(connection.getsockname()[0]) if received == token else None
    except OSError:
        return None


def interface_of(address: str) -> str:
    """Return the network interface that has this address; empty if none has."""
    address = address.removeprefix("::ffff:")
    return next((name for name, known in interface_addresses().items() if address in known), "")
