"""Cut the streams between worker, agent and controller into events: JSON lines, each a dict with a "type".

Output of workers is the one exception, see Note [Output]. `messages.py` gives each kind of event a type.

The agent sends the events of a worker as {"type": "script", "rank": 3, "event": {...}}: scripts can write
anything to their pipe, which must not be taken for the agent's words.

Note [Output]
A worker's output travels as a header line, the raw bytes that it counts, and a newline: {"type": "output",
"rank": 3, "stream": "stdout", "bytes": 5}. As JSON, bytes that are not text would take six times their size,
and most of the launcher's time. The newline is for srun, which holds back the end of an unfinished line. Only
lines before the first such header may be no events (what a shell prints at its start). Later, a line that is
no event means that bytes were lost or added. Output could then be taken for events: the reader stops.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

Event = dict[str, Any]

WORKER_EVENTS = (
    "exception",
    "error_file",
    "metrics",
    "checkpoint",
    "snapshot",
    "environment",
    "standing",
    "save_asked",
    "result",
    "debugger",
)
"""Events that a worker may send; only the agent sends other types."""

STREAMS = ("stdout", "stderr")
"""What a worker writes to."""

_LINE_LIMIT_BYTES = 16 << 20
_OUTPUT_LIMIT_BYTES = 1 << 20
_SHOWN_BYTES = 80
_NEWLINE = ord("\n")
_HUGE = 1 << 1023
_LEVELS = 100
"""Levels of lists and dicts in a script's event: JSON's functions fail at different depths."""


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
    """Wrap an event of a script, in a form that no reader fails at.

    Half characters become question marks. Integers that are too large for a float become infinite.

    Raises:
        ValueError: It is too large or nested too deeply.
    """
    wrapped = {"type": "script", "rank": rank, "event": _tame(event, _LEVELS)}
    if (size := len(encode(wrapped))) > _LINE_LIMIT_BYTES:
        raise ValueError(f"it has {size:,} bytes; the limit is {_LINE_LIMIT_BYTES:,}")
    return wrapped


def _tame(value: Any, levels: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, int):
        return value if -_HUGE < value < _HUGE else math.inf if value > 0 else -math.inf
    if not isinstance(value, (dict, list)):
        return value
    if not levels:
        raise ValueError(f"it is nested deeper than {_LEVELS} levels")
    if isinstance(value, list):
        return [_tame(each, levels - 1) for each in value]
    return {_tame(key, 0): _tame(each, levels - 1) for key, each in value.items()}


def encode_output(rank: int, stream: str, data: bytes) -> bytes:
    """Write what a worker has printed, at most 1 MiB: Note [Output]."""
    header = {"type": "output", "rank": rank, "stream": stream, "bytes": len(data)}
    return b"".join((encode(header), data, b"\n"))


class Output(NamedTuple):
    """Holds what a worker has printed."""

    rank: int
    stream: str
    data: bytes


class AgentStream:
    """Cuts what an agent sends into events and output.

    Where the stream is damaged (Note [Output]), the last event is of type damaged and says why.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """What has come of a line or of output that is not complete."""
        self._size = 0
        self._output: Event | None = None
        """The header whose bytes are to come."""
        self._has_output = False
        self.damaged = False

    def feed(self, chunk: bytes) -> Iterator[Event | Output]:
        """Yield what this chunk completes."""
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._output is None and b"\n" not in chunk and self._size <= _LINE_LIMIT_BYTES:
            return
        if self._output is not None and self._size <= self._output["bytes"]:
            return
        data = b"".join(self._parts)
        at = 0
        event: Event | Output | None
        while not self.damaged:
            if self._output is None:
                end = data.find(b"\n", at)
                if end < 0:
                    break
                event, why = self._read_line(data[at:end])
            else:
                end = at + self._output["bytes"]
                if end >= len(data):
                    break
                event = Output(self._output["rank"], self._output["stream"], data[at:end])
                why = "" if data[end] == _NEWLINE else "no newline follows a rank's output"
                self._output = None
            at = end + 1
            if why:
                yield self._end(why)
            elif event is not None:
                yield event
        rest = data[at:]
        self._parts = [rest] if rest else []
        self._size = len(rest)
        if not self.damaged and self._output is None and self._size > _LINE_LIMIT_BYTES:
            yield self._end("a line has no end")

    def _read_line(self, line: bytes) -> tuple[Event | None, str]:
        """Return the event of a line, if it is one that is complete, and what is wrong with the line."""
        event = decode(line)
        if event is None or not isinstance(event.get("type"), str):
            return None, f"{line[:_SHOWN_BYTES]!r} is no event" if self._has_output else ""
        if event["type"] == "script" and not _is_of_script(event):
            return None, f"{line[:_SHOWN_BYTES]!r} is no event of a script"
        if event["type"] != "output":
            return event, ""
        if not _is_header(event):
            return None, f"{line[:_SHOWN_BYTES]!r} is no header of output"
        self._output = event
        self._has_output = True
        return None, ""

    def _end(self, why: str) -> Event:
        self.damaged = True
        return {"type": "damaged", "why": why}


def _is_header(event: Event) -> bool:
    size = event.get("bytes")
    is_size = type(size) is int and 0 <= size <= _OUTPUT_LIMIT_BYTES
    return is_size and type(event.get("rank")) is int and event.get("stream") in STREAMS


def _is_of_script(event: Event) -> bool:
    inner = event.get("event")
    return type(event.get("rank")) is int and isinstance(inner, dict) and inner.get("type") in WORKER_EVENTS


class LineBuffer:
    """Cuts a stream of chunks into events."""

    def __init__(self) -> None:
        self._rest = b""
        self.left_out = 0
        """Lines that were too long."""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that this chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LINE_LIMIT_BYTES:
            self._rest = b""
            self.left_out += 1
        for line in lines:
            event = decode(line)
            if event is not None:
                yield event
