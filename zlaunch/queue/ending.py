"""End jobs of the queue: those that wait at once, those that run by asking the daemon."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from pathlib import Path

from zlaunch.queue.store import QueuedJob, Store
from zlaunch.queue.wake import queue_folder
from zlaunch.supervisor import run_record
from zlaunch.supervisor.found_runs import FoundRun

CANCELLED = 128 + signal.SIGTERM
"""Exit code of a run that was cancelled, as of one that `zlaunch stop` ends."""
_ORPHAN_S = 60.0
"""Seconds in which a run that is marked as queued has come into the queue, or never will."""
_LOOK_S = 30.0
"""Seconds between questions about one run: who waits for it asks many times a second."""
_looked_at: dict[Path, float] = {}


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
    while known is not None and known.state != "ended" and known.wish not in ("cancel", "cancelling"):
        waiting = replace(known, state="waiting")
        if store.ask(known, "cancel") or end_job(store, waiting, CANCELLED, "cancelled"):
            return
        known = store.find(job.id)


def settle(found: FoundRun) -> FoundRun:
    """Return a run as it stands, also where it is marked as queued and its queue does not know it, or has
    done with it: a `submit` was killed, or the folder could not be written.
    """
    now = time.monotonic()
    if found.state != "queued" or now - _looked_at.get(found.path, -math.inf) < _LOOK_S:
        return found
    _looked_at[found.path] = now
    job = Store(queue_folder()).of_run(found.path)
    if job is not None and job.state == "ended":
        run_record.left_queue(found.path, job.exit_code or 0)
    elif job is None and time.time() - found.record.started > _ORPHAN_S:
        run_record.left_queue(found.path, 1)
    return found.now()
