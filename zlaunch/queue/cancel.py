"""Take jobs out of zlaunch's queue, and stop those that run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zlaunch.errors import LaunchError
from zlaunch.queue.daemon import cancel_job, ensure_daemon, settle
from zlaunch.supervisor.found_runs import find_run, meant

if TYPE_CHECKING:
    from zlaunch.queue.store import Job, Store

_POLL_S = 0.05


def find_jobs(store: Store, texts: Sequence[str]) -> list[Job]:
    """Return the jobs that were named, by number or as runs. Raises LaunchError."""
    found = []
    for text in texts:
        if text.isdecimal() and (job := store.find(int(text))) is not None:
            found.append(job)
            continue
        if text.isdecimal() and not text.startswith("20"):
            raise LaunchError(f"there is no job {text}: `zlaunch queue --all` lists the jobs")
        known = store.of_run(settle(find_run(meant(text))).path)
        if known is None:
            raise LaunchError(f"{text} was not started by the queue: stop it with `zlaunch stop {text}`")
        found.append(known)
    return found


def cancel_jobs(store: Store, folder: Path, jobs: Sequence[Job]) -> list[int]:
    """Take out jobs that have not ended, or ask for their end. Return their numbers."""
    for job in jobs:
        cancel_job(store, job)
    if jobs and (store.rows("running") or store.has_waiting()):
        ensure_daemon(folder)
    return [job.id for job in jobs]


def await_end(store: Store, job_id: int, deadline: float) -> Job | None:
    """Wait for the end of a job. Return the job if it has not ended by `deadline` (monotonic seconds)."""
    while (job := store.find(job_id)) is not None and job.state != "ended":
        if time.monotonic() > deadline:
            return job
        time.sleep(_POLL_S)
    return None
