"""Settle how jobs of the queue stand, and end them. Whoever looks may do it: no daemon is needed.

Note [Who settles]
An attempt's lock and files say what has become of it, also after its daemon and its launcher were killed, or
the machine was booted. The daemon and everyone who looks (`ps`, `wait`, `attach`, `logs`, `queue`, a sweep)
draw the same conclusion and write it down. Each change of a row asks for the state that it was judged by: the
first one wins, and what follows from it (the run's folder) is the winner's to do. The daemon alone starts
jobs; where jobs wait and there is none, whoever looks starts one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zlaunch.errors import LaunchError
from zlaunch.queue.attempt import Attempt, forget
from zlaunch.queue.judge import UNREADY, Judgement, judge
from zlaunch.queue.lost import is_over
from zlaunch.queue.schedule import Place, place_of
from zlaunch.queue.store import Job, QueuedJob, Store, UnreadableJob
from zlaunch.queue.wake import ensure_daemon, has_daemon, queue_folder
from zlaunch.supervisor import run_record
from zlaunch.supervisor.end import End
from zlaunch.supervisor.found_runs import FoundRun

CANCELLED = 128 + signal.SIGTERM
"""Exit code of a run that was cancelled, as of one that `zlaunch stop` ends."""
_KILLED = 128 + signal.SIGKILL
_ORPHAN_S = 60.0
"""Seconds in which a run that is marked as queued has come into the queue, or never will."""
_LOOK_S = 1.0
"""Seconds between questions about one run: who waits for it asks many times a second."""
_looked_at: dict[Path, float] = {}


def end_job(store: Store, folder: Path, job: Job, end: End, why: str) -> bool:
    """End a job of the queue, also in its run's folder; False where it was in another state by now."""
    if not store.end(job, end, why):
        return False
    run_dir = job.submission.run_dir if isinstance(job, QueuedJob) else job.run_dir
    if run_dir:
        run_record.left_queue(Path(run_dir), end)
    forget(folder, job.id)
    return True


def cancel_job(store: Store, job: Job) -> None:
    """Take a job out of the queue, or note that it is to be stopped, which the daemon has to be woken for."""
    known: Job | None = job
    # It may begin to run, or have to wait again, in the meantime.
    while known is not None and known.state != "ended" and known.wish not in ("cancel", "cancelling"):
        if known.state == "waiting":
            done = end_job(store, queue_folder(), known, End(CANCELLED, "stopped"), "cancelled")
        else:
            done = store.ask(known, "cancel")
        if done:
            return
        known = store.find(job.id)


def settle_attempt(
    store: Store, folder: Path, job: Job, *, starts_jobs: bool = False, exit_code: int | None = None
) -> str | None:
    """Settle a running job whose attempt is over: it ends, or waits again. Return what to say of that; None
    where nothing has changed.

    `starts_jobs`: the caller is the daemon, so an attempt that has not begun never will. `exit_code`: its
    launcher's as `Popen` tells it, where the caller has seen it end: it could not write its end, such as on a
    full disk, or not even begin.

    Raises LaunchError and OSError.
    """
    attempt = Attempt(folder, job.id, job.attempt)
    standing, end = attempt.standing()
    if standing == "alive":
        return None
    if standing == "foreign":
        text = f"its files are of zlaunch {attempt.foreign_version()}, which this one cannot read"
        return _end(store, folder, job, End(1, "failed"), text)
    if end is None and standing == "not begun" and exit_code is not None and exit_code >= 0:
        text = f"its launcher ended with exit code {exit_code} before it began; its console.log says why"
        return _end(store, folder, job, End(exit_code or 1, "refused"), text)
    if end is None and exit_code is not None:
        end = _unwritten(exit_code, has_begun=standing != "not begun")
    if end is None and standing == "lost":
        if not is_over(job, attempt):
            return None
        end = End(UNREADY, "saved") if job.wish == "preempt" else End(_KILLED, "lost")
    if end is not None:
        return _settle_end(store, folder, job, end)
    if not starts_jobs:
        return None
    if job.wish in ("cancel", "cancelling") or isinstance(job, UnreadableJob):
        return _end(store, folder, job, End(CANCELLED, "stopped"), "cancelled")
    # A daemon was killed between its note and the start.
    counts = {"attempt": job.attempt, "failures": job.failures, "refusals": job.refusals}
    return "" if store.wait_again(job, "", **counts) else None


def _unwritten(exit_code: int, *, has_begun: bool) -> End | None:
    """Return the end of a launcher that wrote none; None where it was killed and may have left workers."""
    if exit_code < 0:
        return None if has_begun else End(128 - exit_code, "lost")
    return End.of_code(exit_code)


def _settle_end(store: Store, folder: Path, job: Job, end: End) -> str | None:
    if isinstance(job, UnreadableJob):
        return _end(store, folder, job, end, f"exit code {end.code}; {job.text}")
    found = judge(job, end)
    if found.again:
        return _try_again(store, job, found)
    if not end_job(store, folder, job, found.end, found.why):
        return None
    _note_places(store, job, end)
    return found.why


def _try_again(store: Store, job: QueuedJob, found: Judgement) -> str | None:
    counts = {"attempt": job.attempt + 1, "failures": found.failures, "refusals": found.refusals}
    if not store.wait_again(job, found.why, **counts):
        return None
    rests = _note_places(store, job, found.end)
    return "it has made room" if found.why == "preempted" else f"{found.why}{rests}; it will be tried again"


def _note_places(store: Store, job: QueuedJob, end: End) -> str:
    """Let hosts and slots rest that have refused a run; those where one ran are well. Return what to say of
    it.
    """
    if end.cause == "host refused":
        places = _refused_places(job, end)
        return "".join(f"; {place} rests for {store.rest(place):g} s" for place in places)
    if end.cause in ("finished", "failed", "saved", "timed out"):
        store.wake_slots(job.slots)
    return ""


def _refused_places(job: QueuedJob, end: End) -> list[Place]:
    """Return the hosts and slots that refused a job, by the names that the queue has for them."""
    by_name = {job.submission.names.get(host, host): host for host in job.slots}
    if len(job.slots) == 1:  # a launch on one machine gives it another name
        [host] = job.slots
        by_name |= dict.fromkeys((*end.hosts, *(name for name, _ in end.slots)), host)
    places = [by_name[name] for name in end.hosts if name in by_name]
    places += [place_of(by_name[name], slot) for name, slot in end.slots if name in by_name]
    return places or (list(job.slots) if len(job.slots) == 1 else [])


def _end(store: Store, folder: Path, job: Job, end: End, why: str) -> str | None:
    return why if end_job(store, folder, job, end, why) else None


# -- for whoever looks


def settle_queue(store: Store, folder: Path) -> None:
    """Settle all running jobs, and have a daemon if there is work. Raises LaunchError where none starts."""
    running = store.rows("running")
    for job in running:
        _settle(store, folder, job)
    if (running or store.has_waiting()) and not has_daemon(folder):
        ensure_daemon(folder)


def _settle(store: Store, folder: Path, job: Job) -> None:
    """Settle one job; one that cannot be settled, such as on a full disk, stays as it is."""
    try:
        settle_attempt(store, folder, job)
    except OSError:
        pass


def settle(found: FoundRun) -> FoundRun:
    """Return a run as it stands, also where it is marked as queued: its queue may not know it, may have done
    with it, or its daemon and its launcher may have been killed.
    """
    now = time.monotonic()
    if found.state != "queued" or now - _looked_at.get(found.path, -math.inf) < _LOOK_S:
        return found
    _looked_at[found.path] = now
    folder = queue_folder()
    store = Store(folder)
    return _settled(store, folder, found, store.of_run(found.path))


def settle_all(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return runs as `settle` does, with one look into the queue for all of them."""
    queued = [run.state == "queued" for run in runs]
    if not any(queued):
        return list(runs)
    folder = queue_folder()
    store = Store(folder)
    jobs = {_run_dir(job): job for job in store.rows("waiting", "running")}
    has_checked, problem = False, ""
    settled = []
    for run, waits in zip(runs, queued, strict=True):
        if not waits:
            settled.append(run)
            continue
        job = jobs.get(str(run.path.resolve())) or store.of_run(run.path)
        if isinstance(job, QueuedJob) and job.state == "waiting":
            if not has_checked:
                has_checked, problem = True, _check_daemon(folder)
            settled.append(replace(run, note=problem) if problem else run)
        else:
            settled.append(_settled(store, folder, run, job))
    return settled


def _run_dir(job: Job) -> str:
    return job.submission.run_dir if isinstance(job, QueuedJob) else job.run_dir


def _settled(store: Store, folder: Path, run: FoundRun, job: Job | None) -> FoundRun:
    if job is None:
        if time.time() - run.record.started > _ORPHAN_S:
            run_record.left_queue(run.path, End(1, "failed"))
        return run.now()
    if job.state == "running":
        _settle(store, folder, job)
        job = store.find(job.id)
    if job is None or job.state == "ended":  # its folder could not be written then
        end = job.end if isinstance(job, QueuedJob) else None
        code = 1 if job is None or job.exit_code is None else job.exit_code
        run_record.left_queue(run.path, end or End.of_code(code))
        return run.now()
    if isinstance(job, UnreadableJob):
        return replace(run.now(), note=f"job {job.id} is unreadable: {job.text}")
    problem = _check_daemon(folder)
    return replace(run.now(), note=problem) if problem else run.now()


def _check_daemon(folder: Path) -> str:
    """Have a daemon; return why there is none."""
    try:
        if not has_daemon(folder):
            ensure_daemon(folder)
    except LaunchError as error:
        return str(error)
    return ""
