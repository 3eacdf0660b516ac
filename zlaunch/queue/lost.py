"""Tell when a run whose launcher was killed is over: only then may others have its slots.

Its agents end the workers by themselves: on this machine when the launcher's pipe ends, on other hosts when
their lease has run out (Note [Lease] in `zlaunch/node/lease.py`). Here /proc proves it.
"""

from __future__ import annotations

from zlaunch.queue.attempt import Attempt
from zlaunch.queue.store import Job, QueuedJob
from zlaunch.system import boot_clock
from zlaunch.system.processes import run_processes, sweep

_HERE = "localhost"
_AGENTS_S = 5.0
"""Seconds beyond the grace period in which agents on this machine have ended their workers."""
_SETTLING_S = 1.0
"""Seconds after which agents on this machine know that the launcher is gone, and start nothing more."""
_LEASE_S = 0.5
"""Seconds beyond the heartbeat at which a lease has run out for certain."""
_GRACE_S, _HEARTBEAT_S = 3.0, 60.0
"""What is assumed of a job that cannot be read."""


def grace_s(job: Job) -> float:
    """Return the seconds that a job's workers have to end."""
    return job.submission.grace_s if isinstance(job, QueuedJob) else _GRACE_S


def run_id(job: Job) -> str:
    """Return the id of a job's run; "" where it is not known."""
    return job.submission.run_id if isinstance(job, QueuedJob) else job.run_id


def is_over(job: Job, attempt: Attempt) -> bool:
    """Tell whether nothing of a lost attempt runs any more; kill what outlives its time. Raises OSError."""
    since_s = attempt.lost_for_s()
    if not attempt.is_of_this_boot:
        return _is_over_elsewhere(job, boot_clock.now_s())  # it was lost before this boot
    if since_s < _SETTLING_S or not _is_over_elsewhere(job, since_s):
        return False
    name, limit_s = run_id(job), grace_s(job) + _AGENTS_S
    if not attempt.is_here or not name:  # /proc does not show its processes
        return since_s >= limit_s
    if since_s >= limit_s:
        sweep(name)
    return not run_processes(name)


def _is_over_elsewhere(job: Job, lost_for_s: float) -> bool:
    if set(job.slots) <= {_HERE}:
        return True
    heartbeat_s = job.submission.heartbeat_s if isinstance(job, QueuedJob) else _HEARTBEAT_S
    return lost_for_s >= heartbeat_s + _LEASE_S
