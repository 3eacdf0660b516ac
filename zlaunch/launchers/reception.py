"""Accept connections and read a line from each, without waiting for a single one.

Anyone may connect: the number of connections, the bytes of a line and its time are bounded.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

LINE_BYTES = 4096
_LINE_S = 5.0
"""Seconds in which a caller must complete its line."""
_MOST_SILENT = 128
"""Connections that may be open without a complete line."""


@dataclass(slots=True, eq=False)
class Caller:
    """Holds a connection, and what it has sent of its line."""

    connection: socket.socket
    until: float
    """The time by which its line must be complete; infinite once it is."""
    line: bytearray = field(default_factory=bytearray)


class Reception:
    """Takes over a listener, and closes it and all connections at the end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._poll = selectors.DefaultSelector()
        self._callers: list[Caller] = []

    def __enter__(self) -> Reception:
        """Begin to accept connections."""
        self._listener.setblocking(False)
        self._poll.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        """Close everything."""
        for caller in self._callers:
            caller.connection.close()
        self._poll.close()
        self._listener.close()

    def heard(self, limit_s: float) -> list[Caller]:
        """Wait a while, and return callers that have completed their line, also if it is none of ours. A
        caller that is returned again has hung up, or has sent more than its line.
        """
        now = time.monotonic()
        for caller in [each for each in self._callers if each.until <= now]:
            self.dismiss(caller)
        next_s = min((caller.until for caller in self._callers), default=math.inf) - now
        found = []
        for key, _ in self._poll.select(timeout=min(limit_s, next_s)):
            caller = key.data
            if caller is None:
                self._accept()
            elif caller in self._callers and _has_ended(caller):
                caller.until = math.inf
                found.append(caller)
        return found

    def dismiss(self, caller: Caller) -> None:
        """Close a caller's connection."""
        self._callers.remove(caller)
        self._poll.unregister(caller.connection)
        caller.connection.close()

    def _accept(self) -> None:
        silent = [caller for caller in self._callers if caller.until < math.inf]
        if len(silent) >= _MOST_SILENT:
            self.dismiss(silent[0])  # a node sends its line at once, and connects again where it is lost
        with suppress(OSError):
            connection = self._listener.accept()[0]
            connection.setblocking(False)
            caller = Caller(connection, time.monotonic() + _LINE_S)
            self._callers.append(caller)
            self._poll.register(connection, selectors.EVENT_READ, caller)


def _has_ended(caller: Caller) -> bool:
    """Read what is there. Return whether the caller's line is complete, too long, or never will be."""
    if caller.until == math.inf:
        return True
    try:
        chunk = caller.connection.recv(LINE_BYTES - len(caller.line))
    except BlockingIOError:
        return False
    except OSError:
        return True
    caller.line += chunk
    return not chunk or caller.line.endswith(b"\n") or len(caller.line) >= LINE_BYTES
