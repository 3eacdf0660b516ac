"""Run the queue of one user on one machine: start jobs, look after them, end when there are none.

`python -m zlaunch.queue.daemon`; `zlaunch submit` starts it. Everything it knows is in the queue's file and
in the attempts' files, so that one that is killed can be followed by another at any moment.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.queue import schedule
from zlaunch.queue.attempt import Attempt
from zlaunch.queue.ending import end_job, settle_attempt
from zlaunch.queue.start_request import StartRequest
from zlaunch.queue.stop import Stops
from zlaunch.queue.store import Job, QueuedJob, Store, UnreadableJob
from zlaunch.queue.wake import LOG, is_mine, open_wake, queue_folder, take_lock
from zlaunch.supervisor import run_record
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.end import End
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.system import boot_clock
from zlaunch.system.processes import kill, open_pidfd, python_module_argv

_REFUSED = End(1, "refused")
_LOOK_S = 5.0
"""Seconds between looks at what tells nothing by itself, such as launchers that are killed."""
_SOON_S = 0.5
"""Seconds between looks at what is about to happen: a launcher that begins, or workers that end."""
_REMIND_S = 10.0
"""Seconds between signals to a run that is to make room."""
_IDLE_S = 5.0
"""Seconds without a job after which the daemon ends."""
_LOG_BYTES = 1_000_000


class Daemon:
    """Gives slots to jobs, and takes them back."""

    def __init__(self, folder: Path, store: Store, lock: int) -> None:
        self._folder, self._store, self._lock, self._wake = folder, store, lock, open_wake(folder)
        self._children: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        """Job and attempt -> its launcher, if this daemon has started it."""
        self._ends: dict[tuple[int, int], int | None] = {}
        """Job and attempt -> what becomes readable when its launcher ends; None once it has."""
        self._asked_at: dict[tuple[int, int], float] = {}
        """Job and attempt -> when it was last asked to make room."""
        self._stops = Stops()
        self._said: set[tuple[int, str]] = set()
        """What has been said of jobs that cannot be read or looked after: once is enough."""
        self._look_again_s = _LOOK_S

    def run(self) -> None:
        """Work until there has been no job for a while, or the queue's folder is gone."""
        idle_since: float | None = None
        while is_mine(self._folder, self._lock):
            self._look_again_s = _LOOK_S
            try:
                busy = self._look()
            except (LaunchError, OSError) as error:  # such as a full disk: nothing is lost by trying again
                say(f"error: {error}")
                busy = True
            now = time.monotonic()
            idle_since = None if busy else now if idle_since is None else idle_since
            if idle_since is not None and now - idle_since >= _IDLE_S:
                return
            self._sleep()

    def _look(self) -> bool:
        """Look after what runs, start what can start; tell whether there is any job."""
        rows = self._store.rows("waiting", "running")
        over = [self._look_after(job) for job in rows if job.state == "running"]
        if any(over):
            rows = self._store.rows("waiting", "running")
        running = [job for job in rows if job.state == "running"]
        self._watch(running)
        waiting = [job for job in rows if job.state == "waiting" and isinstance(job, QueuedJob)]
        for job in rows:
            if isinstance(job, UnreadableJob):
                self._say_once(job, f"unreadable: {job.text}")
        self._start_jobs(waiting, running)
        return bool(waiting or running)

    def _sleep(self) -> None:
        """Sleep until something can have changed: a wake, a launcher's end, the next moment of a limit."""
        ends = {fd: key for key, fd in self._ends.items() if fd is not None}
        readable = select.select([self._wake, *ends], [], [], max(0.0, self._look_again_s))[0]
        try:
            os.read(self._wake, 1 << 16)
        except BlockingIOError:
            pass
        for fd in readable:
            if fd in ends:
                os.close(fd)
                self._ends[ends[fd]] = None
        for child in self._children.values():
            child.poll()

    def _look_within(self, seconds: float) -> None:
        self._look_again_s = min(self._look_again_s, seconds)

    def _watch(self, running: Sequence[Job]) -> None:
        """Watch the launchers of these jobs, and no others."""
        keys = {(job.id, job.attempt) for job in running}
        for key in [key for key in self._ends if key not in keys]:
            fd = self._ends.pop(key)
            if fd is not None:
                os.close(fd)
        self._children = {key: child for key, child in self._children.items() if key in keys}
        for job in running:
            key = job.id, job.attempt
            if key not in self._ends:
                process = self._attempt(job).process()
                fd = None if process is None else open_pidfd(process.pid)
                if fd is not None:
                    self._ends[key] = fd
                elif key in self._children:  # it has not begun yet
                    self._look_within(_SOON_S)
            elif self._ends[key] is None:  # its launcher has ended, and the job has not
                self._look_within(_SOON_S)

    def _attempt(self, job: Job) -> Attempt:
        return Attempt(self._folder, job.id, job.attempt)

    # -- jobs that run

    def _look_after(self, job: Job) -> bool:
        """Settle a job that is over, stop one that is to end; tell whether it is over. It harms no other."""
        try:
            child = self._children.get((job.id, job.attempt))
            code = None if child is None else child.poll()
            said = settle_attempt(
                self._store,
                self._folder,
                job,
                starts_jobs=child is None or code is not None,
                exit_code=code,
            )
            if said is None:
                self._stop(job)
                return False
        except (LaunchError, OSError) as error:
            self._say_once(job, f"error: {error}")
            return False
        self._stops.forget(job.id)
        if said:
            say(f"job {job.id}: {said}")
        return True

    def _stop(self, job: Job) -> None:
        """Stop a launcher whose job is to end: cancelled, or beyond its time limit."""
        left_s = _time_left_s(job)
        if job.wish == "preempt" or not job.wish:
            self._look_within(left_s)
        if job.wish not in ("cancel", "cancelling", "timeout") and left_s > 0:
            return
        attempt = self._attempt(job)
        process = attempt.process()
        if not attempt.is_here:
            self._say_once(job, "its launcher is in another pid namespace, and cannot be stopped from here")
        elif process is None:  # it has not begun, and cannot be signalled yet
            self._look_within(_SOON_S)
        elif job.wish in ("cancelling", "timeout"):
            if said := self._stops.insist(job, process):
                say(f"job {job.id}: {said}")
            self._look_within(max(_SOON_S, self._stops.next_s(job)))
        elif self._store.ask(job, "cancelling" if job.wish == "cancel" else "timeout"):
            self._stops.ask(job, process)
            self._look_within(_SOON_S)

    def _ask_for_room(self, job: QueuedJob) -> None:
        """Have a run save and end. It is asked again and again: at its beginning it cannot hear yet."""
        process, now = self._attempt(job).process(), time.monotonic()
        since_s = now - self._asked_at.get((job.id, job.attempt), -math.inf)
        if process is not None and since_s >= _REMIND_S:
            self._asked_at[job.id, job.attempt] = now
            kill(process, signal.SIGUSR1)
            since_s = 0.0
        self._look_within(_SOON_S if process is None else _REMIND_S - since_s)

    # -- jobs that wait

    def _start_jobs(self, jobs: Sequence[QueuedJob], running: Sequence[Job]) -> None:
        waiting = [job for job in jobs if self._may_start(job)]
        if not waiting:
            return
        resting = self._store.resting()
        if resting:
            self._look_within(min(resting.values()))
        chosen = schedule.decide(
            [schedule.Waiting(job.id, job.submission.priority, job.submission.demand) for job in waiting],
            [_as_running(job) for job in running],
            resting,
        )
        highest = max(job.submission.priority for job in waiting)
        for job in running:
            if isinstance(job, UnreadableJob):
                continue
            asked = job.wish == "preempt" or (job.id in chosen.preempted and self._store.ask(job, "preempt"))
            if asked and job.submission.priority < highest:
                self._ask_for_room(job)
        for job in waiting:
            if job.id in chosen.starts:
                self._start(job, chosen.starts[job.id])
                self._look_within(_SOON_S)

    def _may_start(self, job: QueuedJob) -> bool:
        """Tell whether all runs that come before it have ended well; end the job where one has not."""
        for text in job.submission.after:
            path = Path(text)
            known = run_record.read(path)
            if known is not None and not FoundRun(path.name, path, known).has_ended:
                return False
            if known is None or known.exit_code != 0:
                self._refuse(job, f"{path.name} has not ended well")
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
        except (OSError, LaunchError) as error:  # its working folder may be gone
            self._refuse(job, _why_not(job, error))
        finally:
            os.close(lock)

    def _refuse(self, job: QueuedJob, reason: str) -> None:
        """End a job that cannot be started."""
        why = f"not started: {reason}"
        known = self._store.find(job.id) or job
        if known.state != "ended" and end_job(self._store, self._folder, known, _REFUSED, why):
            say(f"job {job.id}: {why}")
            _tell(job.submission.run_dir, why)
            self._look_within(0.0)  # others may wait for it

    def _say_once(self, job: Job, text: str) -> None:
        if (job.id, text) not in self._said:
            self._said.add((job.id, text))
            say(f"job {job.id}: {text}")


def _time_left_s(job: Job) -> float:
    """Return the seconds until a job's time limit, which no clock step and no suspension moves."""
    if not isinstance(job, QueuedJob) or job.submission.time_s is None or job.started_clock is None:
        return math.inf
    return job.started_clock + job.submission.time_s - boot_clock.now_s()


def _as_running(job: Job) -> schedule.Running:
    if isinstance(job, UnreadableJob):
        return schedule.Running(job.id, 0, job.slots, False, bool(job.wish))
    submission = job.submission
    return schedule.Running(job.id, submission.priority, job.slots, submission.preemptible, bool(job.wish))


def _why_not(job: QueuedJob, error: OSError | LaunchError) -> str:
    starter = job.submission.starter
    if starter and isinstance(error, FileNotFoundError) and not os.path.exists(starter[0]):
        return f"{starter[0]}, the Python that it was submitted with, is gone: submit it again"
    return str(error)


def text_of(slots: schedule.Slots) -> str:
    """Return slots in the grammar of --include."""
    return "@".join(f"{host}:{','.join(map(str, numbers))}" for host, numbers in slots.items())


def _spawn(
    folder: Path, job: QueuedJob, slots: schedule.Slots, lock: int, environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the launcher of an attempt by the zlaunch that it was submitted with; it holds the attempt's lock
    from then on. Raises OSError.
    """
    submission = job.submission
    named = {submission.names.get(host, host): numbers for host, numbers in slots.items()}
    options = (*submission.options, "--include", text_of(named), "--run_dir", submission.run_dir)
    request = StartRequest(
        folder=str(folder),
        job=job.id,
        attempt=job.attempt,
        run_id=submission.run_id,
        lock=lock,
        version=job.version if submission.starter else "",
        path=submission.path,
        settings=submission.settings,
    )
    starter = submission.starter or python_module_argv("zlaunch.cli.queued")
    with open(Path(submission.run_dir, CONSOLE_LOG), "ab") as log:
        return subprocess.Popen(
            [*starter, request.as_text(), *options, *submission.command],
            cwd=submission.cwd,
            env=environ,
            umask=submission.umask,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _tell(run_dir: str, text: str) -> None:
    """Write a line into a run's console log."""
    try:
        with open(Path(run_dir, CONSOLE_LOG), "ab") as log:
            log.write(f"zlaunch: {text}\n".encode("utf-8", "backslashreplace"))
    except OSError:  # its folder may be gone: the queue has it
        pass


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
        say(f"zlaunch {__version__} begins")
        Daemon(folder, store, lock).run()
        os.close(lock)
        # A job may have come while we were about to end.
        if not (folder / LOG).exists() or not store.jobs("waiting", "running"):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
