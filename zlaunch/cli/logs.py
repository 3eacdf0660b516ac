"""`zlaunch logs`: print what the ranks of a run have printed, and follow it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from pathlib import Path

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option
from zlaunch.launch import run_record
from zlaunch.launch.found_runs import FoundRun, find_run, meant
from zlaunch.plan.checks import parse_ranks
from zlaunch.view.console import Console

_POLL_S = 0.1
_BLOCK_BYTES = 1 << 16
_NAME = re.compile(r"rank_(\d+)\.log")


@click.command(cls=Command, context_settings=SETTINGS, short_help="Print the output of a run's ranks.")
@click.argument("run", metavar="[RUN]", default="last")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended; Ctrl-C leaves it alone.")
@click.option("--rank", "chosen", metavar="RANKS", help="Such as 0,3-4.  [default: all]")
@count_option("-n", "--lines", low=0, help="Only the last ones of each rank, and with -f what follows.")
def logs(run: str, follow: bool, chosen: str | None, lines: int | None) -> int:
    """Print what the ranks of RUN have printed; by default of the `last` run.

    Standard output and error of a rank are one log. Each line has its rank in front where there are several.
    """
    found = find_run(meant(run))
    wanted = None if chosen is None else parse_ranks("--rank", chosen)
    known = max([found.record.world_size, *(rank + 1 for rank in _files(found.path / "logs", None))])
    if wanted is not None and wanted[-1] >= known:
        raise click.UsageError(f"--rank {chosen}: there is no rank {wanted[-1]}; the last is {known - 1}")
    count = known if wanted is None else len(wanted)
    console = Console(None if count > 1 else wanted or [0])
    offsets: dict[int, int] = {}
    if follow and found.state.startswith("on "):
        console.message(
            f"the launcher is {found.state}: if it is killed, that is not seen here; Ctrl-C ends this"
        )
    while True:
        has_ended = not follow or _has_ended(found)  # asked first: what comes afterwards is still read
        for rank, path in _files(found.path / "logs", wanted).items():
            try:
                if rank not in offsets:
                    offsets[rank] = 0 if lines is None else _offset_of_last(path, lines)
                offsets[rank] = _show(console, rank, path, offsets[rank])
            except FileNotFoundError:
                continue  # it has just been removed
            if not follow:
                console.close()
        if has_ended or not console.is_read:
            break
        time.sleep(_POLL_S)
    console.close()
    if not offsets:
        raise click.UsageError(f"{run}: no rank {'' if wanted is None else 'of these '}has a log")
    return 0


def _has_ended(run: FoundRun) -> bool:
    known = run_record.read(run.path)
    return known is None or FoundRun(run.name, run.path, known).state.startswith(("ended", "gone"))


def _files(folder: Path, wanted: Collection[int] | None) -> dict[int, Path]:
    """Return the logs that there are by now, by rank."""
    found = {}
    for path in folder.glob("rank_*.log"):
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return {rank: found[rank] for rank in sorted(found) if wanted is None or rank in wanted}


def _show(console: Console, rank: int, path: Path, offset: int) -> int:
    """Show what a log has from an offset on, and return the next one."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < offset:
            offset = 0  # somebody has emptied it
        file.seek(offset)
        while console.is_read and (data := file.read(_BLOCK_BYTES)):
            console.output(rank, "stdout", data)
            offset += len(data)
    return offset


def _offset_of_last(path: Path, lines: int) -> int:
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
