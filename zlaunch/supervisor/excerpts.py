"""Read the files of a run's folder for a report: only those in it, a bounded part of each, no secrets."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from zlaunch.supervisor.redact import redact, redact_json
from zlaunch.system.events import Event, decode

HEAD_BYTES, TAIL_BYTES = 16 << 10, 64 << 10
"""Limits what is taken of a log's beginning and end."""
FIRST_METRICS, LAST_METRICS = 50, 500
"""Lines of metrics that are taken."""
_MARGIN_BYTES = 16 << 10
"""Read beyond a cut, so that a secret that lies across it is seen whole."""
_NEAR_BYTES = 4 << 10
"""A log is cut between two lines where there is a line break so near."""
_EVENT_BYTES = 1 << 20
_FILE_BYTES = 16 << 20
_METRICS = b'"type":"metrics"'
_NOISE = (b'"type":"output"', b'"type":"pong"')


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Holds the part of a file that goes into a report."""

    text: str
    secrets: int
    """Counts those that were taken out."""
    size: int
    """Bytes of the whole file."""
    left_out: int = 0
    """Bytes of a log, or lines of the events, that are not in the text."""


@dataclass(slots=True)
class KnownEvents:
    """Holds the events of a run: the text for the report, and those that are no metrics."""

    excerpt: Excerpt
    events: list[Event] = field(default_factory=list)


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a plain file in a folder. Raises OSError, also for a link that leads out of the folder."""
    try:
        path = (folder / name).resolve(strict=True)
    except RuntimeError:  # Python before 3.13 says so of links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    if not path.is_relative_to(folder.resolve()):
        raise OSError(errno.EPERM, "it is a link to outside of the run's folder")
    # O_NONBLOCK: to open a FIFO would wait for somebody who writes into it.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file")
    return open(fd, "rb")


def as_text(data: bytes) -> str:
    """Decode what may be any bytes, so that `as_bytes` gives the same ones again."""
    return data.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """Encode what `as_text` has decoded, or anything else."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a character, which JSON may name
        return text.encode("utf-8", "backslashreplace")


def read_whole(folder: Path, name: str, values: tuple[str, ...]) -> Excerpt:
    """Read a JSON file. Raises OSError."""
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes, which is too much")
        text, secrets = redact_json(as_text(file.read(_FILE_BYTES)), values, indent=1)
    return Excerpt(text + "\n", secrets, size)


def read_ends(folder: Path, name: str, values: tuple[str, ...]) -> Excerpt:
    """Read the beginning and the end of a log, cut between lines where that is possible. Raises OSError."""
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size  # of a log that grows, what is there now
        if size <= HEAD_BYTES + TAIL_BYTES:
            text, secrets = redact(as_text(file.read(size)), values)
            return Excerpt(text, secrets, size)
        head = file.read(HEAD_BYTES + _MARGIN_BYTES)
        file.seek(size - TAIL_BYTES - _MARGIN_BYTES)
        tail = file.read(TAIL_BYTES + _MARGIN_BYTES)
    stop = head.rfind(b"\n", HEAD_BYTES - _NEAR_BYTES, HEAD_BYTES) + 1 or HEAD_BYTES
    start = tail.find(b"\n", _MARGIN_BYTES - 1, _MARGIN_BYTES + _NEAR_BYTES) + 1 or _MARGIN_BYTES
    first, count = redact(as_text(head), values, 0, len(as_text(head[:stop])))
    last, more = redact(as_text(tail), values, len(as_text(tail[:start])))
    left_out = size - stop - (len(tail) - start)
    note = f"\n[zlaunch bundle: {left_out} bytes left out here]\n"
    return Excerpt(first.removesuffix("\n") + note + last, count + more, size, left_out)


def read_events(folder: Path, name: str, values: tuple[str, ...]) -> KnownEvents:
    """Read all events but output and pongs, and of the metrics the first and the last. Raises OSError."""
    kept: list[tuple[int, str]] = []
    events: list[Event] = []
    last: deque[tuple[int, bytes]] = deque(maxlen=LAST_METRICS)
    secrets = metrics = long = 0

    def keep(number: int, line: bytes) -> None:
        nonlocal secrets
        text, count = redact_json(as_text(line.rstrip(b"\n")), values)
        kept.append((number, text))
        secrets += count

    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        number, is_rest = 0, False
        while line := file.readline(_EVENT_BYTES):
            number += 1
            whole = line.endswith(b"\n")
            if is_rest or (not whole and len(line) == _EVENT_BYTES):
                long += not is_rest
                is_rest = not whole
            elif not whole and decode_safely(line) is None:
                continue  # the rest of it may still be on its way, and half a secret is at its end
            elif _METRICS in line:  # not parsed: most lines of a long run are metrics
                metrics += 1
                if metrics <= FIRST_METRICS:
                    keep(number, line)
                else:
                    last.append((number, line))
            elif not any(mark in line for mark in _NOISE):
                if event := decode_safely(line):  # else another program has written into the file
                    events.append(event)
                keep(number, line)
    for number, line in last:
        keep(number, line)
    text = "".join(f"{line}\n" for _, line in sorted(kept))
    left_out = max(0, metrics - FIRST_METRICS - LAST_METRICS) + long
    return KnownEvents(Excerpt(text, secrets, size, left_out), events)


def decode_safely(line: bytes) -> Event | None:
    """Read a line as an event; None also for one that is nested too deep."""
    try:
        return decode(line)
    except RecursionError:
        return None
