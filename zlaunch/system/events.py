"""Encode and decode events between worker, agent and controller: JSON lines, each a dict with a "type".

From a worker: exception, error_file (what torch's `@record` has written), metrics, checkpoint, snapshot,
environment, standing (where it has waited for long) and result (what a program of ours hands to its command).
From an agent also: agent, spawn, output, exit, stopping, error and done. To an agent: {"cmd": "kill"} and
{"cmd": "stop", "grace_s": 3.0}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

WORKER_EVENTS = (
    "exception",
    "error_file",
    "metrics",
    "checkpoint",
    "snapshot",
    "environment",
    "standing",
    "result",
)
"""Events that a worker may send; only the agent sends other types."""

_LINE_LIMIT_BYTES = 16 << 20


def encode(event: Event) -> bytes:
    """Write an event as one line; ASCII only, so that any text survives any transport."""
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """Read a line as an event; None when it is something else (a worker may scribble on its event pipe)."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


class LineBuffer:
    """Cuts a stream of chunks into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that this chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LINE_LIMIT_BYTES:
            self._rest = b""
        for line in lines:
            event = decode(line)
            if event is not None:
                yield event
