"""Run the queue of one user on one machine: start jobs, look after them, end when there are none.

`python -m zlaunch.queue.daemon`; `zlaunch submit` starts it. Everything it knows is in the queue's file and
in the folders of the runs, so that one that is killed can be followed by another at any moment.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from zlaunch.errors import LaunchError
from zlaunch.queue import schedule
from zlaunch.queue.attempt import Attempt, forget
from zlaunch.queue.ending import CANCELLED, end_job
from zlaunch.queue.store import QueuedJob, Store
from zlaunch.queue.wake import LOG, is_mine, open_wake, queue_folder, take_lock
from zlaunch.supervisor import run_record
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.failure import SAVED_CODE
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.system.processes import kill, python_module_argv, signal_name, sweep

_NEVER_BEGUN = 1
_UNREADY = 128 + signal.SIGUSR1
"""Exit code of a run that was asked to make room before it could take the signal."""
_NO_RETRY = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Codes after which it is not tried again: refused at the start, or stopped by the user."""
_LOOK_S = 0.5
"""Seconds between looks at what tells nothing by itself: time limits, launchers that were killed."""
_REMIND_S = 10.0
"""Seconds between signals to a run that is to make room."""
_IDLE_S = 5.0
"""Seconds without a job after which the daemon ends."""
_AGENTS_S = 5.0
"""Seconds beyond the grace period in which agents whose launcher was killed have ended their workers."""
_LOG_BYTES = 1_000_000


class Daemon:
    """Gives slots to jobs, and takes them back."""

    def __init__(self, folder: Path, store: Store, lock: int) -> None:
        self._folder, self._store, self._lock, self._wake = folder, store, lock, open_wake(folder)
        self._children: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        """Job and attempt -> its launcher, if this daemon has started it."""
        self._killed_at: dict[int, float] = {}
        """Job -> when its launcher was seen to be gone (monotonic seconds)."""
        self._asked_at: dict[tuple[int, int], float] = {}
        """Job and attempt -> when it was last asked to make room."""

    def run(self) -> None:
        """Work until there has been no job for a while, or the queue's folder is gone."""
        idle_since: float | None = None
        while is_mine(self._folder, self._lock):
            try:
                for job in self._store.jobs("running"):
                    self._look_after(job)
                self._start_jobs()
                busy = bool(self._store.jobs("waiting", "running"))
            except (LaunchError, OSError) as error:  # such as a full disk: nothing is lost by trying again
                say(f"error: {error}")
                busy = True
            now = time.monotonic()
            idle_since = None if busy else now if idle_since is None else idle_since
            if idle_since is not None and now - idle_since >= _IDLE_S:
                return
            select.select([self._wake], [], [], _LOOK_S)
            self._drain()

    def _drain(self) -> None:
        try:
            os.read(self._wake, 1 << 16)
        except BlockingIOError:
            pass
        for child in self._children.values():
            child.poll()

    # -- jobs that run

    def _look_after(self, job: QueuedJob) -> None:
        attempt = self._attempt(job)
        child = self._children.get((job.id, job.attempt))
        standing, code = attempt.standing()
        if standing == "alive":
            self._remind(job, attempt)
            return
        if code is None and child is not None:
            # It could not write its end, such as on a full disk, or not even begin.
            known = child.poll()
            if known is None:
                return
            code = known if known >= 0 else None
            code = _NEVER_BEGUN if code == 0 and standing == "not begun" else code
        if code is not None:
            self._ended(job, code, _told(code))
        elif standing == "killed":
            if self._is_over(job):
                code = _UNREADY if job.wish == "preempt" else 128 + signal.SIGKILL
                self._ended(job, code, "its launcher was killed")
        elif job.wish in ("cancel", "cancelling"):
            self._end(job, CANCELLED, "cancelled")
        else:  # a daemon was killed between its note and the start
            self._store.wait_again(job, "", attempt=job.attempt, failures=job.failures)

    def _attempt(self, job: QueuedJob) -> Attempt:
        return Attempt(self._folder, job.id, job.attempt)

    def _remind(self, job: QueuedJob, attempt: Attempt) -> None:
        """Signal a launcher whose job is to end; once, as a second SIGTERM kills."""
        process = attempt.process()
        limit = job.submission.time_s
        late = limit is not None and job.started is not None and time.time() - job.started > limit
        if process is None or job.wish in ("cancelling", "timeout") or not (late or job.wish == "cancel"):
            return
        kill(process, signal.SIGTERM)
        self._store.ask(job, "cancelling" if job.wish == "cancel" else "timeout")

    def _ask_for_room(self, job: QueuedJob) -> None:
        """Have a run save and end. It is asked again and again: at its beginning it cannot hear yet."""
        process, now = self._attempt(job).process(), time.monotonic()
        if process is not None and now - self._asked_at.get((job.id, job.attempt), -math.inf) >= _REMIND_S:
            self._asked_at[job.id, job.attempt] = now
            kill(process, signal.SIGUSR1)

    def _is_over(self, job: QueuedJob) -> bool:
        """Tell whether a job whose launcher was killed has left its slots: its agents end their workers."""
        since = self._killed_at.setdefault(job.id, time.monotonic())
        if time.monotonic() - since < job.submission.grace_s + _AGENTS_S:
            return False
        sweep(job.submission.run_id)
        del self._killed_at[job.id]
        return True

    def _ended(self, job: QueuedJob, code: int, why: str) -> None:
        """Note an attempt's end: the job's, or it waits for another one."""
        if job.wish in ("cancel", "cancelling"):
            self._end(job, code, "cancelled")
        elif job.wish == "timeout":
            self._end(job, code, f"time limit of {job.submission.time_s:g} s")
        elif code in (SAVED_CODE, _UNREADY) and job.wish == "preempt":
            say(f"job {job.id} has made room")
            self._store.wait_again(job, "preempted", attempt=job.attempt + 1, failures=job.failures)
        elif code and code not in _NO_RETRY and job.failures < job.submission.retries:
            say(f"job {job.id}: {why}; it will be tried again")
            self._store.wait_again(job, why, attempt=job.attempt + 1, failures=job.failures + 1)
        else:
            self._end(job, code, why)

    def _end(self, job: QueuedJob, code: int, why: str) -> None:
        end_job(self._store, job, code, why)
        forget(self._folder, job.id)
        self._children = {key: child for key, child in self._children.items() if key[0] != job.id}
        say(f"job {job.id}: {why}")

    # -- jobs that wait

    def _start_jobs(self) -> None:
        waiting = [job for job in self._store.jobs("waiting") if self._may_start(job)]
        if not waiting:
            return
        running = self._store.jobs("running")
        chosen = schedule.decide(
            [schedule.Waiting(job.id, job.submission.priority, job.submission.demand) for job in waiting],
            [
                schedule.Running(
                    job.id, job.submission.priority, job.slots, job.submission.preemptible, bool(job.wish)
                )
                for job in running
            ],
        )
        highest = max(job.submission.priority for job in waiting)
        for job in running:
            asked = job.wish == "preempt" or (job.id in chosen.preempted and self._store.ask(job, "preempt"))
            if asked and job.submission.priority < highest:
                self._ask_for_room(job)
        for job in waiting:
            if job.id in chosen.starts:
                self._start(job, chosen.starts[job.id])

    def _may_start(self, job: QueuedJob) -> bool:
        """Tell whether all runs that come before it have ended well; end the job where one has not."""
        for text in job.submission.after:
            path = Path(text)
            known = run_record.read(path)
            if known is not None and not FoundRun(path.name, path, known).has_ended:
                return False
            if known is None or known.exit_code != 0:
                self._end(job, _NEVER_BEGUN, f"not started: {path.name} has not ended well")
                return False
        return True

    def _start(self, job: QueuedJob, slots: schedule.Slots) -> None:
        lock = self._attempt(job).lock()
        if lock is None:
            return  # it is there already, which the next look will show
        try:
            environ = self._store.environ(job.id)
            if not self._store.start(job.id, slots):
                return  # cancelled in the meantime
            self._children[job.id, job.attempt] = _spawn(self._folder, job, slots, lock, environ)
            say(f"job {job.id} starts on {text_of(slots)}")
        except OSError as error:  # its working folder may be gone
            self._end(self._store.find(job.id) or job, _NEVER_BEGUN, f"not started: {error}")
        finally:
            os.close(lock)


def text_of(slots: schedule.Slots) -> str:
    """Return slots in the grammar of --include."""
    return "@".join(f"{host}:{','.join(map(str, numbers))}" for host, numbers in slots.items())


def _spawn(
    folder: Path, job: QueuedJob, slots: schedule.Slots, lock: int, environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the launcher of an attempt, which holds the attempt's lock from then on. Raises OSError."""
    submission = job.submission
    named = {submission.names.get(host, host): numbers for host, numbers in slots.items()}
    options = (*submission.options, "--include", text_of(named), "--run_dir", submission.run_dir)
    about = (str(folder), str(job.id), str(job.attempt), submission.run_id, str(lock))
    with open(Path(submission.run_dir, CONSOLE_LOG), "ab") as log:
        return subprocess.Popen(
            [*python_module_argv("zlaunch.cli.queued"), *about, *options, *submission.command],
            cwd=submission.cwd,
            env=environ,
            umask=submission.umask,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _told(code: int) -> str:
    if code > 128:
        return f"stopped by {signal_name(code - 128)}"
    return f"exit code {code}"


def say(text: str) -> None:
    """Write a line into the daemon's log."""
    try:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)
    except OSError:  # a full disk ends nothing
        pass


def main() -> int:
    """Run the daemon, unless there is one. The argument is a descriptor that is told when that is known."""
    folder = queue_folder()
    says_so: int | None = int(sys.argv[1])
    if (folder / LOG).exists() and (folder / LOG).stat().st_size > _LOG_BYTES:
        os.truncate(folder / LOG, 0)  # opened to append: what follows begins at its start
    store = Store(folder)
    while True:
        lock = take_lock(folder)
        if says_so is not None:
            os.write(says_so, b"!")
            os.close(says_so)
            says_so = None
        if lock is None:  # whoever holds it sees to the jobs
            break
        Daemon(folder, store, lock).run()
        os.close(lock)
        if not (folder / LOG).exists() or not store.jobs(
            "waiting", "running"
        ):  # else it came while we were about to end
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
