"""Encode and decode events between worker, agent and controller: JSON lines, each a dict with a "type".

Output of workers is the one exception. The raw bytes follow a line that counts them: {"type": "output",
"rank": 3, "stream": "stdout", "bytes": 5}. As JSON, bytes that are not text would take six times their size,
and most of the launcher's time.

From a worker: exception, error_file (what torch's `@record` has written), metrics, checkpoint, snapshot,
environment, standing (where it has waited for long) and result (what a program of ours hands to its command).
The agent sends them as {"type": "script", "rank": 3, "event": {...}}: scripts can write anything to their
pipe, which must not be taken for the agent's words. From an agent: agent, spawn, output, exit, stopping,
error and done. To an agent: {"cmd": "kill"} and {"cmd": "stop", "grace_s": 3.0}.
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
_OUTPUT_LIMIT_BYTES = 1 << 20


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


def in_envelope(rank: int, event: Event) -> Event:
    """Wrap an event of a script. Half characters, which no terminal takes, become question marks."""
    try:
        json.dumps(event, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        event = json.loads(json.dumps(event, ensure_ascii=False).encode(errors="replace"))
    return {"type": "script", "rank": rank, "event": event}


def encode_output(rank: int, stream: str, data: bytes) -> bytes:
    """Write what a worker has printed: a line and the bytes behind it, at most 1 MiB."""
    return encode({"type": "output", "rank": rank, "stream": stream, "bytes": len(data)}) + data


class AgentStream:
    """Cuts what an agent sends into events; those of output have the bytes as "data".

    After a line that does not tell how many bytes follow, nothing can be read any more: that is an event of
    type error, and the stream is `damaged`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._output: Event | None = None
        """The event whose bytes are to come."""
        self.damaged = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that this chunk completes."""
        data = self._rest + chunk if self._rest else chunk
        at = 0
        while not self.damaged:
            if self._output is not None:
                end = at + self._output["bytes"]
                if end > len(data):
                    break
                yield {**self._output, "data": data[at:end]}
                self._output = None
                at = end
                continue
            end = data.find(b"\n", at)
            if end < 0:
                break
            event = decode(data[at:end])
            at = end + 1
            if event is not None and event.get("type") == "output":
                size = event.get("bytes")
                if type(size) is int and 0 <= size <= _OUTPUT_LIMIT_BYTES:
                    self._output = event
                else:
                    self.damaged = True
                    yield {"type": "error", "message": f"the agent's words are damaged: {size!r} bytes"}
            elif event is not None:
                yield event
        self._rest = data[at:]
        if self.damaged or (self._output is None and len(self._rest) > _LINE_LIMIT_BYTES):
            self._rest = b""


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
