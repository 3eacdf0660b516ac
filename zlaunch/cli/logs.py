"""`zlaunch logs`: print what the ranks of a run have printed, and follow it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option
from zlaunch.plan.checks import parse_ranks
from zlaunch.queue.daemon import settle
from zlaunch.supervisor.found_runs import find_run, meant
from zlaunch.supervisor.run_files import OLDER, LogPiece, LogReader, times_path
from zlaunch.view.console import Console

_POLL_S = 0.1
_BLOCK_BYTES = 1 << 16
_NAME = re.compile(r"rank_(\d+)\.log")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _moment(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Read a moment, as seconds since the epoch: so long ago, a time of today, or a date."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text):
        return time.time() - float(ago[1]) * _UNITS[ago[2]]
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()
            return datetime.combine(datetime.now(), clock).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a time: 90s, 10m, 2h or 1d ago, 13:05, or 2026-01-31T13:05"
        ) from None


@click.command(cls=Command, context_settings=SETTINGS, short_help="Print the output of a run's ranks.")
@click.argument("run", metavar="[RUN]", default="last")
@click.option(
    "-f", "--follow", is_flag=True, help="Follow the output until the run ends. Ctrl-C does not stop the run."
)
@click.option("--rank", "chosen", metavar="RANKS", help="Ranks to show, such as 0,3-4.  [default: all]")
@count_option("-n", "--lines", low=0, help="Show only the last N lines of each rank.")
@click.option("-t", "--timestamps", is_flag=True, help="Prefix each line with its time.")
@click.option(
    "--since",
    metavar="WHEN",
    callback=_moment,
    help="Show only output since 90s, 10m, 2h, 1d (ago), 13:05 or a date.",
)
@click.option("--stdout", "only", flag_value="stdout", help="Show only standard output.")
@click.option("--stderr", "only", flag_value="stderr", help="Show only standard error.")
def logs(
    run: str,
    follow: bool,
    chosen: str | None,
    lines: int | None,
    timestamps: bool,
    since: float | None,
    only: str | None,
) -> int:
    """Print the output of RUN's ranks.  [default: last]

    The log of a rank has its standard output and error. With several ranks, each line starts with its rank.
    """
    if lines is not None and (since is not None or only is not None):
        raise click.UsageError("--lines cannot be combined with --since, --stdout and --stderr")
    found = find_run(meant(run))
    wanted = None if chosen is None else parse_ranks("--rank", chosen)
    known = max([found.record.world_size, *(rank + 1 for rank in _files(found.path / "logs", None))])
    if wanted is not None and wanted[-1] >= known:
        raise click.UsageError(f"--rank {chosen}: there is no rank {wanted[-1]}; the last is {known - 1}")
    count = known if wanted is None else len(wanted)
    show = _Show(Console(None if count > 1 else wanted or [0]), timestamps, since or 0.0, only)
    if follow and not found.has_ended and not found.shows_its_end:
        show.console.message(
            f"the launcher is {found.state}: if it is killed, that is not seen here; Ctrl-C ends this"
        )
    readers: dict[int, LogReader] = {}
    has_log = False
    while True:
        has_ended = not follow or settle(found.now()).has_ended  # asked first: what comes later is still read
        for rank, path in _files(found.path / "logs", wanted).items():
            has_log = True
            try:
                if rank not in readers:
                    if show.needs_times and not times_path(path).exists():
                        if not path.stat().st_size:  # it has written nothing so far
                            continue
                        raise click.UsageError(f"{path} has no timestamps: an older zlaunch wrote it")
                    readers[rank] = _reader(path, lines)
                for piece in readers[rank].read(_BLOCK_BYTES):
                    show(rank, piece)
                    if not show.console.is_read:
                        break
            except FileNotFoundError:
                continue  # it has just been removed
            if not follow:
                show.console.close()
        if has_ended or not show.console.is_read:
            break
        time.sleep(_POLL_S)
    show.console.close()
    if not has_log:
        raise click.UsageError(f"{run}: no rank {'' if wanted is None else 'of these '}has a log")
    return int(show.console.has_failed)


@dataclass
class _Show:
    """Shows pieces of logs, those that are wanted."""

    console: Console
    timestamps: bool
    since_s: float
    only: str | None
    _inside_line: set[int] = field(default_factory=set)
    """Lists the ranks whose last piece has not ended its line."""

    @property
    def needs_times(self) -> bool:
        """Tell whether what is noted about pieces decides what is shown."""
        return self.timestamps or self.since_s > 0 or self.only is not None

    def __call__(self, rank: int, piece: LogPiece) -> None:
        time_s = piece.time_s or 0.0
        if (self.since_s and time_s < self.since_s) or self.only not in (None, piece.stream):
            return
        data = piece.data
        if self.timestamps:
            data = self._stamped(rank, data, time_s)
        self.console.output(rank, "stdout", data)

    def _stamped(self, rank: int, data: bytes, time_s: float) -> bytes:
        """Return data with the time before each line that begins in it."""
        stamp = f"{datetime.fromtimestamp(time_s).isoformat(' ', 'milliseconds')} ".encode()
        lines = data.split(b"\n")
        for index in range(len(lines)):
            begins = index > 0 or rank not in self._inside_line
            if begins and (lines[index] or index < len(lines) - 1):
                lines[index] = stamp + lines[index]
        if lines[-1]:
            self._inside_line.add(rank)
        elif len(lines) > 1:
            self._inside_line.discard(rank)
        return b"\n".join(lines)


def _reader(path: Path, lines: int | None) -> LogReader:
    """Return a reader of a log, or of its last lines, which may begin in the older half."""
    older = path.with_name(path.name + OLDER)
    if lines is None:
        return LogReader(path, older_start=0 if older.exists() else None)
    start = offset_of_last(path, lines)
    if start or not older.exists():
        return LogReader(path, start)
    text = path.read_bytes()
    missing = lines - text.count(b"\n") - (not text.endswith(b"\n"))  # the last line may be unfinished
    if not older.read_bytes().endswith(b"\n"):
        missing += 1  # its last line ends in the log
    return LogReader(path, older_start=offset_of_last(older, missing) if missing > 0 else None)


def _files(folder: Path, wanted: Collection[int] | None) -> dict[int, Path]:
    """Return the logs that there are by now, by rank."""
    found = {}
    for path in folder.glob("rank_*.log"):
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return {rank: found[rank] for rank in sorted(found) if wanted is None or rank in wanted}


def offset_of_last(path: Path, lines: int) -> int:
    """Return the offset at which the last lines of a file begin."""
    with open(path, "rb") as file:
        end = position = file.seek(0, os.SEEK_END)
        if not lines:
            return end
        missing = lines + 1  # the line break at the end of the file ends the last line
        while position > 0:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(position - start)
            if position == end and not block.endswith(b"\n"):
                missing -= 1
            breaks = block.count(b"\n")
            if breaks >= missing:
                for _ in range(missing):
                    block = block[: block.rindex(b"\n")]
                return start + len(block) + 1
            missing -= breaks
            position = start
    return 0
