"""`zlaunch attach` and `wait`: see what a detached run shows, and wait for the end of any run."""

from __future__ import annotations

import os
import sys
import time

import click

from zlaunch.cli.commands import SETTINGS, Command, count_option, seconds_option
from zlaunch.cli.logs import offset_of_last
from zlaunch.queue.ending import settle
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.found_runs import FoundRun, find_run, meant

_POLL_S = 0.1
_BLOCK_BYTES = 1 << 16


@click.command(cls=Command, context_settings=SETTINGS, short_help="Show the console of a detached run.")
@click.argument("run", metavar="[RUN]", default="last")
@count_option("-n", "--lines", low=0, default=100, show_default=True, help="Earlier lines to show first.")
def attach(run: str, lines: int) -> int:
    """Show the console of RUN, which was started with --detach, until the run ends.  [default: last]

    Ctrl-C leaves the run alone. The exit code is the run's.
    """
    found = _here(meant(run), "attach")
    path = found.path / CONSOLE_LOG
    if not path.exists():
        raise click.UsageError(
            f"{run} was not started with --detach: follow its output with `zlaunch logs -f {run}`"
        )
    try:
        with open(path, "rb") as file:
            file.seek(offset_of_last(path, lines))
            while True:
                has_ended = settle(found.now()).has_ended  # asked first: what comes afterwards is still read
                while block := file.read(_BLOCK_BYTES):
                    sys.stdout.buffer.write(block)
                sys.stdout.flush()
                if has_ended:
                    return _exit_code(found.now())
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        print(f"\nzlaunch: {found.name} goes on; to end it: zlaunch stop {found.name}", file=sys.stderr)
        return 130


@click.command(
    cls=Command, context_settings=SETTINGS, short_help="Wait until a run ends and exit with its code."
)
@click.argument("run", metavar="[RUN]", default="last")
@seconds_option("--timeout", "Give up after this many seconds, with exit code 124.", low=0)
def wait(run: str, timeout: float | None) -> int:
    """Wait until RUN ends and exit with its exit code.  [default: last]"""
    found = _here(meant(run), "wait")
    deadline = None if timeout is None else time.monotonic() + timeout
    has_warned = False
    while not (now := settle(found.now())).has_ended:
        if now.note and not has_warned:  # nobody will start it
            print(f"zlaunch wait: warning: {run} {now.shown_state}", file=sys.stderr)
            has_warned = True
        if deadline is not None and time.monotonic() >= deadline:
            print(f"zlaunch wait: error: {run} has not ended within {timeout:g} s", file=sys.stderr)
            return 124
        time.sleep(_POLL_S)
    return _exit_code(found.now())


def _here(text: str, command: str) -> FoundRun:
    """Return a run whose end can be seen on this host. Raises click.UsageError."""
    found = settle(find_run(text))
    if found.record.ended is None and found.is_elsewhere and not found.has_ended:
        job = found.record.slurm_job
        reach = f"srun --overlap --pty --jobid {job} -n1" if job else f"ssh -t {found.record.host}"
        there = f"{reach} {sys.executable} -m zlaunch {command} {found.path.absolute()}"
        raise click.UsageError(f"the launcher of {text} is on {found.record.host}: {there}")
    return found


def _exit_code(found: FoundRun) -> int:
    """Return the exit code of a run that has ended."""
    if (end := found.record.end) is not None:
        if end.cause != "finished":
            print(f"zlaunch: {found.name}: {end.words} (exit code {end.code})", file=sys.stderr)
        return end.code
    where = os.path.relpath(found.path)
    print(f"zlaunch: error: {where}: the launcher was killed and wrote no exit code", file=sys.stderr)
    return 1
