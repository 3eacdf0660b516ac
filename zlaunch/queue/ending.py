"""End jobs of the queue: those that wait at once, those that run by asking the daemon."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from zlaunch.queue.store import QueuedJob, Store
from zlaunch.supervisor import run_record

CANCELLED = 128 + signal.SIGTERM
"""Exit code of a run that was cancelled, as of one that `zlaunch stop` ends."""


def end_job(store: Store, job: QueuedJob, code: int, why: str) -> bool:
    """End a job of the queue, also in its run's folder; False where it was in another state by now."""
    path = Path(job.submission.run_dir)
    if job.state == "waiting" and not store.end(job.id, "waiting", code, why):
        return False
    run_record.left_queue(path, code)
    return job.state == "waiting" or store.end(job.id, "running", code, why)


def cancel_job(store: Store, job: QueuedJob) -> None:
    """Take a job out of the queue, or note that it is to be stopped, which the daemon has to be woken for."""
    known: QueuedJob | None = job
    # It may begin to run, or have to wait again, in the meantime.
    while known is not None and known.state != "ended":
        if store.ask(job.id, "cancel") or end_job(
            store, replace(job, state="waiting"), CANCELLED, "cancelled"
        ):
            return
        known = store.find(job.id)
