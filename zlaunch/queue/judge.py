"""Judge the end of an attempt: the job ends with it, or waits for another attempt. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from zlaunch.queue.store import QueuedJob
from zlaunch.supervisor.end import End
from zlaunch.system.processes import signal_name

UNREADY = 128 + signal.SIGUSR1
"""Exit code of a run that was asked to make room before it could take the signal."""
MOST_REFUSALS = 10
"""How often hosts may refuse a job."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Says what becomes of a job."""

    end: End
    why: str
    again: bool = False
    """Whether it waits for another attempt."""
    failures: int = 0
    refusals: int = 0


def judge(job: QueuedJob, end: End) -> Judgement:
    """Judge an attempt that has ended: by what the job was asked for, then by the cause."""
    failures, refusals = job.failures, job.refusals
    if job.wish in ("cancel", "cancelling"):
        return Judgement(end if end.code == 0 else replace(end, cause="stopped"), "cancelled")
    if job.wish == "timeout":
        limit = f"time limit of {job.submission.time_s or 0:g} s"
        return Judgement(end if end.code == 0 else replace(end, cause="timed out"), limit)
    if job.wish == "preempt" and (end.cause == "saved" or end.code == UNREADY):
        return Judgement(end, "preempted", again=True, failures=failures, refusals=refusals)
    why = said(end)
    if end.cause == "host refused":
        again = failures < job.submission.retries and refusals < MOST_REFUSALS
        return Judgement(end, why, again, failures, refusals + 1)
    again = end.cause in ("failed", "lost") and failures < job.submission.retries
    return Judgement(end, why, again, failures + 1, refusals)


def said(end: End) -> str:
    """Return an end in words, as `zlaunch queue` shows it."""
    if end.cause == "lost":
        return "its launcher was killed"
    if end.cause == "stopped" and end.code > 128:
        return f"stopped by {signal_name(end.code - 128)}"
    if end.cause in ("finished", "failed", "stopped"):
        return f"exit code {end.code}"
    if end.cause == "refused":
        return f"refused, exit code {end.code}"
    return end.words
