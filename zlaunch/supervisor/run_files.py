"""Write down what happens in a run: its events and its ranks' output."""

from __future__ import annotations

import bisect
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from zlaunch.plan.plan import Plan
from zlaunch.runtime.trust import Folder, make_folder
from zlaunch.system.events import STREAMS, Event, LineBuffer, encode

# -- rank logs --------------------------------------------------------------------------------------
#
# Write the log of each rank, with the times and streams of its lines, and read both again.
#
# A log, `rank_00000.log`, has the bytes that the rank has printed. `.times/rank_00000.log` beside it has a
# record for each piece that arrived, in a folder that `cat logs/*` passes over. Where logs are bounded, the
# older half is in files whose names end in `.1`.


OLDER = ".1"
TIMES = ".times"
"""Names the folder of what is noted about the logs beside it."""
_RECORD = struct.Struct("<QdB")
"""Offset in the log, seconds since the epoch, number of the stream."""


def log_path(run_dir: str | Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(run_dir, "logs", f"rank_{rank:05d}.log")


def times_path(log: Path) -> Path:
    """Return the path of what is noted about a log's pieces; that of the older half ends in OLDER, too."""
    return log.parent / TIMES / log.name


class RankLogs:
    """Holds the open logs of a run's ranks."""

    def __init__(self, run_dir: Path, ranks: Collection[int], *, goes_on: bool, limit: int | None) -> None:
        """Open the logs of ``ranks``; with ``goes_on`` after what an earlier attempt has written. A log and
        its older half together have at most ``limit`` bytes, give or take a piece. Raises OSError.
        """
        self._run_dir = run_dir
        self._half = None if limit is None else limit // 2
        (run_dir / "logs" / TIMES).mkdir(exist_ok=True)
        if not goes_on:
            for log in (log_path(run_dir, rank) for rank in ranks):
                for path in (log, times_path(log)):
                    path.unlink(missing_ok=True)
                    path.with_name(path.name + OLDER).unlink(missing_ok=True)
        self._open = {rank: _OpenLog(log_path(run_dir, rank)) for rank in ranks}

    def write(self, rank: int, stream: str, data: bytes, time_s: float) -> None:
        """Append a piece of a rank's output. Raises OSError."""
        log = self._open[rank]
        if log.is_cut:  # a killed attempt has left half a line
            log.is_cut = False
            data = b"\n" + data
        if self._half is not None and log.size and log.size + len(data) > self._half:
            log.close()
            for path in (log.path, times_path(log.path)):
                if path.exists():
                    path.replace(path.with_name(path.name + OLDER))
            log = self._open[rank] = _OpenLog(log.path)
        log.write(stream, data, time_s)

    def close(self) -> None:
        """Close all logs."""
        for log in self._open.values():
            log.close()


class _OpenLog:
    """Appends to a log, which stays open, and to its times, which do not: there may be a thousand ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed by close
        self.size = os.fstat(self._file.fileno()).st_size
        self.is_cut = self.size > 0 and os.pread(self._file.fileno(), 1, self.size - 1) != b"\n"
        """Whether an earlier attempt has not ended its last line."""

    def write(self, stream: str, data: bytes, time_s: float) -> None:
        try:
            _append(times_path(self.path), _RECORD.pack(self.size, time_s, STREAMS.index(stream)))
        finally:
            rest = memoryview(data)
            while rest:  # a disk that is nearly full takes a part, and then says so
                written = self._file.write(rest)
                self.size += written
                rest = rest[written:]

    def close(self) -> None:
        self._file.close()


def _append(path: Path, record: bytes) -> None:
    """Append a record, in the place of one that a full disk has cut short: else all would be out of step."""
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if rest := size % len(record):
            os.ftruncate(file.fileno(), size - rest)
        file.write(record)


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Holds bytes of a log that arrived together."""

    data: bytes
    stream: str
    time_s: float | None
    """Seconds since the epoch; None where nothing was noted."""


class LogReader:
    """Reads a log piece by piece while it grows, its older half first."""

    def __init__(self, path: Path, start: int = 0, *, older_start: int | None = None) -> None:
        """Begin at byte ``start``, or, where that is given, at byte ``older_start`` of the older half."""
        self._path = path
        self._at = start
        self._inode = 0
        self._waiting: list[tuple[Path, int]] = []
        """Lists files that are read before the log, and where they begin."""
        if older_start is not None:
            self._waiting.append((path.with_name(path.name + OLDER), older_start))

    def read(self, most_bytes: int) -> Iterator[LogPiece]:
        """Yield what has come since the last call, in pieces of at most ``most_bytes``. Raises OSError."""
        while self._waiting:
            older, start = self._waiting.pop(0)
            yield from _read(older, start, most_bytes)
        found = os.stat(self._path)
        if self._inode not in (0, found.st_ino):
            # the log has become the older half, perhaps with something that has not been read yet
            before = self._path.with_name(self._path.name + OLDER)
            if before.exists() and before.stat().st_ino == self._inode:
                yield from _read(before, self._at, most_bytes)
            self._at = 0
        elif found.st_size < self._at:
            self._at = 0  # somebody has emptied it
        self._inode = found.st_ino
        for piece in _read(self._path, self._at, most_bytes):
            self._at += len(piece.data)
            yield piece


def _read(log: Path, start: int, most_bytes: int) -> Iterator[LogPiece]:
    """Yield the pieces of a file from a byte on."""
    at = start
    with open(log, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        if at >= end:
            return
        file.seek(at)
        for stream, time_s, until in _noted(log, at):
            while at < min(until, end) and (data := file.read(min(most_bytes, until - at, end - at))):
                yield LogPiece(data, stream, time_s)
                at += len(data)
            if at >= end:
                return


def _noted(log: Path, start: int) -> Iterator[tuple[str, float | None, int]]:
    """Yield stream, time and end of the pieces of a log, from the one that has the byte ``start`` on."""
    path = times_path(log)
    stream = STREAMS[0]
    time_s = None
    if path.exists():
        with open(path, "rb") as file:
            count = os.fstat(file.fileno()).st_size // _RECORD.size

            def offset(index: int) -> int:
                return int(_RECORD.unpack(os.pread(file.fileno(), _RECORD.size, index * _RECORD.size))[0])

            first = bisect.bisect_right(range(count), start, key=offset)
            file.seek(max(0, first - 1) * _RECORD.size)
            while block := file.read(_RECORD.size * 1024):
                for begin, moment, number in _RECORD.iter_unpack(
                    block[: len(block) // _RECORD.size * _RECORD.size]
                ):
                    if begin > start:
                        yield stream, time_s, begin
                    stream = STREAMS[number]
                    time_s = moment
    yield stream, time_s, 1 << 62


# -- run files --------------------------------------------------------------------------------------


class RunFiles:
    """Writes the plan, the events and the logs of an attempt. A full disk does not end the training: it is
    said once for each file that it is incomplete.

    The folder stays open: see Note [Trust by owner] in runtime/trust.py.
    """

    def __init__(
        self,
        run_dir: Path,
        hosts: Mapping[int, str],
        say: Callable[[str], None],
        *,
        goes_on: bool,
        log_bytes: int | None,
    ) -> None:
        """Open the files; `goes_on`: behind what an earlier attempt has written. `hosts` are those of the
        ranks, `log_bytes` the size of a rank's log. Raises OSError.
        """
        self._run_dir = run_dir
        self._say = say
        self._unwritten: set[Path] = set()
        make_folder(run_dir)  # it may have been removed since
        with ExitStack() as stack:
            self._folder = stack.enter_context(Folder(run_dir))
            inside = self._folder.path
            (inside / "logs").mkdir(exist_ok=True)
            self._logs = RankLogs(inside, hosts, goes_on=goes_on, limit=log_bytes)
            stack.callback(self._logs.close)
            self._events = (inside / "events.jsonl").open("ab" if goes_on else "wb", buffering=0)
            stack.callback(self._events.close)
            self._open = stack.pop_all()

    def plan(self, plan: Plan) -> None:
        """Write the attempt's plan. Raises OSError."""
        plan.write(self._folder.path / "plan.json")

    def event(self, event: Event) -> None:
        """Write an event with its time; what torch's `@record` has written elsewhere is a file of its own."""
        if event["type"] == "error_file":
            self._error_file(event)
            return
        try:
            self._events.write(encode({**event, "time": event.get("time", time.time())}))
        except OSError as error:
            self._not_written(self._run_dir / "events.jsonl", error)

    def _error_file(self, event: Event) -> None:
        name = f"logs/error_{event['rank']:05d}.json"
        try:
            (self._folder.path / name).write_text(str(event.get("text")))
        except OSError as error:
            self._not_written(self._run_dir / name, error)

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """Write what a rank has written."""
        try:
            self._logs.write(rank, stream, data, time.time())
        except OSError as error:
            self._not_written(log_path(self._run_dir, rank), error)

    def _not_written(self, path: Path, error: OSError) -> None:
        if path not in self._unwritten:
            self._unwritten.add(path)
            self._say(f"cannot write {path}: {error.strerror}; the run goes on, the file has gaps")

    def close(self) -> None:
        """Close the files."""
        self._open.close()


# -- event file -------------------------------------------------------------------------------------
#
# Read the events of a run from its file, also while it is written.


_BLOCK_BYTES = 1 << 20


class EventFile:
    """Reads the events of a run's file, and later those that have come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines = LineBuffer()

    def read(self) -> Iterator[Event]:
        """Yield the events that have come since the last call; none where there is no file.

        Raises OSError, also where the folder is not trusted: see Note [Trust by owner] in runtime/trust.py.
        """
        try:
            with Folder(self._path.parent) as folder, folder.open(self._path.name) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # another run has begun in the folder
                    self._lines = LineBuffer()
                file.seek(self._offset)
                while chunk := file.read(_BLOCK_BYTES):
                    self._offset += len(chunk)
                    yield from self._lines.feed(chunk)
        except FileNotFoundError:
            return
