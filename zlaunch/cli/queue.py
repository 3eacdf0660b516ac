"""`zlaunch queue` and `cancel`: see what waits and runs, and take it out."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zlaunch.cli.commands import SETTINGS, Command
from zlaunch.cli.submit import QUEUE_OPTION
from zlaunch.errors import LaunchError
from zlaunch.queue.submit import QueueName, choose_queue

if TYPE_CHECKING:
    from zlaunch.queue.store import Job, Store

_WAIT_S = 60.0


@click.command(cls=Command, context_settings=SETTINGS, short_help="List queued and running jobs.")
@QUEUE_OPTION
@click.option("-a", "--all", "show_all", is_flag=True, help="Show ended jobs too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; times are seconds since the epoch.")
def queue(chosen_queue: QueueName | None, show_all: bool, as_json: bool) -> int:
    """List your queued and running jobs, in zlaunch's queue on this machine or in SLURM."""
    if choose_queue(chosen_queue) == "slurm":
        return _show_slurm(as_json=as_json, show_all=show_all)
    from zlaunch.queue.daemon import settle_queue
    from zlaunch.queue.job_text import JOB_COLUMNS, job_row

    store, folder = _open()
    try:
        settle_queue(store, folder)
    except LaunchError as error:  # the list is right, but nothing will start
        print(f"zlaunch queue: warning: {error}", file=sys.stderr)
    jobs = store.rows("waiting", "running")
    if show_all:
        jobs = sorted([*jobs, *itertools.chain.from_iterable(store.ended_pages())], key=lambda job: job.id)
    if as_json:
        print(json.dumps([_as_data(job) for job in jobs], indent=2))
        return 0
    if not jobs:
        print(
            "the queue is empty" if show_all else "nothing waits or runs in the queue; what has ended: --all"
        )
        return 0
    from zlaunch.cli.tables import make_table, stdout_console

    stdout_console().print(make_table(JOB_COLUMNS, map(job_row, jobs), whole=("run",)))
    for place, seconds in store.backing_off().items():
        print(f"{place} rests for {seconds:.0f} s, because it has refused a run")
    return 0


def _open() -> tuple[Store, Path]:
    from zlaunch.queue.daemon import queue_folder
    from zlaunch.queue.store import Store

    folder = queue_folder()
    return Store(folder), folder


def _as_data(job: Job) -> dict[str, Any]:
    from zlaunch.queue.store import UnreadableJob

    if isinstance(job, UnreadableJob):
        return {**asdict(job), "run": job.run_id, "dir": job.run_dir, "why": f"unreadable: {job.text}"}
    given = job.submission
    names = ("id", "state", "slots", "attempt", "submitted", "started", "ended", "exit_code", "cause", "why")
    return {
        **{name: getattr(job, name) for name in names},
        "run": given.run_id,
        "dir": given.run_dir,
        "priority": given.priority,
        "command": list(given.command),
    }


def _show_slurm(*, as_json: bool, show_all: bool) -> int:
    from zlaunch.slurm.commands import own_jobs

    if show_all:
        raise click.UsageError(
            "--all: sacct lists ended jobs, and `zlaunch ps --all` their runs in this folder"
        )
    jobs = own_jobs()
    if as_json:
        print(json.dumps(jobs, indent=2))
    elif not jobs:
        print("nothing of yours waits or runs in SLURM")
    else:
        from zlaunch.cli.tables import make_table, stdout_console

        stdout_console().print(
            make_table(tuple(jobs[0]), [tuple(job.values()) for job in jobs], whole=("id",))
        )
    return 0


# -- cancel


@click.command(cls=Command, context_settings=SETTINGS, short_help="Remove jobs from the queue, or stop them.")
@QUEUE_OPTION
@click.argument("runs", metavar="JOB|RUN...", nargs=-1, required=True)
def cancel(chosen_queue: QueueName | None, runs: tuple[str, ...]) -> int:
    """Remove jobs from the queue. Running jobs are stopped.

    In zlaunch's queue, exit code 1 means that a job did not end within a minute. SLURM's jobs are not waited
    for.
    """
    if choose_queue(chosen_queue) == "slurm":
        from zlaunch.sweep.job_array import task_of

        meant_runs = [task_of(Path(text)) or (text if text.isdecimal() else _job_of(text)) for text in runs]
        jobs = [text for text in meant_runs if text.partition("_")[0].isdecimal()]
        names = tuple(text for text in meant_runs if text not in jobs)
        if names and chosen_queue is not None:
            raise click.UsageError(
                f"{names[0]!r} is not a SLURM job ID; use --queue local for zlaunch's own queue"
            )
        _cancel_in_slurm(jobs)
        return _cancel_in_own_queue(names) if names else 0
    return _cancel_in_own_queue(runs)


def _job_of(text: str) -> str:
    """Return the SLURM job that runs a run of `zlaunch submit`; the text itself where there is none."""
    from zlaunch.slurm.commands import is_batch
    from zlaunch.supervisor.found_runs import find_run, meant

    try:
        run = find_run(meant(text))
    except LaunchError:
        return text  # what handles it says more
    job = run.record.slurm_task or run.record.slurm_job
    if job and run.record.ended is None and not is_batch(job):
        raise click.UsageError(
            f"{text} runs in job {job} of salloc: stop it there with `zlaunch stop {text}`"
        )
    return job or text


def _cancel_in_slurm(jobs: Sequence[str]) -> None:
    from zlaunch.slurm import commands

    for job in jobs:
        commands.cancel(job)
        print(f"{job}: cancelled")


def _cancel_in_own_queue(runs: Sequence[str]) -> int:
    from zlaunch.queue.cancel import await_end, cancel_jobs, find_jobs
    from zlaunch.queue.job_text import job_name

    store, folder = _open()
    jobs = find_jobs(store, runs)
    ended = [job for job in jobs if job.state == "ended"]
    for job in ended:
        text = f"job {job.id} has already ended, with code {job.exit_code}"
        if len(jobs) == 1:
            raise click.UsageError(text)
        print(text)
    asked = cancel_jobs(store, folder, [job for job in jobs if job not in ended])
    deadline = time.monotonic() + _WAIT_S
    for job_id in asked:
        if (left := await_end(store, job_id, deadline)) is not None:
            text = f"job {job_id} has not ended within {_WAIT_S:g} s: zlaunch stacks {job_name(left)}"
            print(f"zlaunch cancel: error: {text}", file=sys.stderr)
            return 1
        print(f"job {job_id}: cancelled")
    return 0
