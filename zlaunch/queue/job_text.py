"""Describe a job of the queue in words, for `zlaunch queue` and `zlaunch ui`."""

from __future__ import annotations

import time
from pathlib import Path

from zlaunch.queue.daemon import text_of
from zlaunch.queue.store import Job, QueuedJob
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.run_folder import name_of

JOB_COLUMNS = ("job", "run", "state", "priority", "slots", "since", "why", "command")
_COMMAND = 50
"""Characters of a command in the table."""
_CUT = " ... "


def job_row(job: Job) -> tuple[str, ...]:
    """Return the cells of a job for JOB_COLUMNS."""
    if not isinstance(job, QueuedJob):
        about = f"{job.text}; zlaunch cancel {job.id} removes it"
        state = f"{job.state}, unreadable"
        return str(job.id), job_name(job), state, "", text_of(job.slots), "", about, ""
    return (
        str(job.id),
        job_name(job),
        _state(job),
        str(job.submission.priority),
        text_of(job.slots),
        _elapsed(job),
        _why(job),
        _command(job),
    )


def _command(job: QueuedJob) -> str:
    """Return the user's name of a run, and its command without its middle: its end tells jobs apart."""
    options = [word for option in job.submission.options for word in option.split("=", 1)]
    name = options[options.index("--name") + 1] + ": " if "--name" in options[:-1] else ""
    text = " ".join(job.submission.command)
    if len(text) > _COMMAND:
        half = (_COMMAND - len(_CUT)) // 2
        text = f"{text[:half].rstrip()}{_CUT}{text[-half:].lstrip()}"
    return name + text


def job_name(job: Job) -> str:
    """Return the name of a job's run; "?" where it is not known."""
    path = run_dir_of(job)
    return "?" if path == Path() else name_of(path)


def run_dir_of(job: Job) -> Path:
    """Return the folder of a job's run; an empty path where it is not known."""
    return Path(job.submission.run_dir if isinstance(job, QueuedJob) else job.run_dir)


def _state(job: QueuedJob) -> str:
    if job.state == "ended":
        return f"ended {job.exit_code}"
    return {"": job.state, "preempt": "making room"}.get(job.wish, "stopping")


def _why(job: QueuedJob) -> str:
    """Return why a job ended as it did, or what it waits for."""
    if job.state != "waiting":
        return job.why
    demand = job.submission.demand
    count = (demand.per_node or max(map(len, demand.pool.values()))) * demand.nodes
    after = [
        name_of(path)
        for path in map(Path, job.submission.after)
        if (known := run_folder.read(path)) is not None
        and (known.ended is None or run_folder.is_queued(path))
    ]
    waits = f"after {', '.join(after)}" if after else f"for {count} slot{'s' * (count > 1)}"
    return f"{job.why}; {waits}" if job.why else waits


def _elapsed(job: QueuedJob) -> str:
    since = {"waiting": job.submitted, "running": job.started, "ended": job.ended}[job.state]
    minutes, seconds = divmod(max(0, int(time.time() - (since or job.submitted))), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
