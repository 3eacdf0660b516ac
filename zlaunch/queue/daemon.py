"""Run the queue of one user on one machine: start jobs, look after them, end when there are none.

`python -m zlaunch.queue.daemon`; `zlaunch submit` starts it. Everything it knows is in the queue's file and
in the attempts' files, so that one that is killed can be followed by another at any moment.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from zlaunch import __version__
from zlaunch.errors import LaunchError
from zlaunch.queue import schedule
from zlaunch.queue.schedule import Place, place_of
from zlaunch.queue.start_request import PROTOCOL, StartRequest
from zlaunch.queue.store import Job, QueuedJob, Store, UnreadableJob
from zlaunch.runtime.trust import make_folder
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.detach import CONSOLE_LOG
from zlaunch.supervisor.end import End
from zlaunch.supervisor.found_runs import FoundRun
from zlaunch.system import boot_clock
from zlaunch.system.processes import (
    Process,
    kill,
    kill_leftovers,
    open_pidfd,
    pid_namespace,
    python_module_argv,
    run_processes,
    signal_name,
    start_ticks,
)
from zlaunch.system.user import state_folder

# -- attempt ----------------------------------------------------------------------------------------
#
# Keep the files of one attempt at a queued run: a lock that its launcher holds, its beginning, its end.
#
# They say what has become of it, whoever asks, with or without a daemon. `begun` names the boot and the pid
# namespace that its process id belongs to.


_FOLDER = "attempts"
AttemptStatus = Literal["not begun", "alive", "ended", "lost", "foreign"]
"""`lost`: nobody holds its lock, and nobody wrote its end. `foreign`: another zlaunch wrote its files."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Names an attempt. Its files lie in the queue's folder: a user may remove a run's at any time."""

    queue: Path
    job_id: int
    number: int

    def lock(self) -> int | None:
        """Hold the attempt while the returned descriptor, or a copy, is open; None where another does.

        Raises OSError.
        """
        return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def begin(self) -> None:
        """Note that this process is the attempt's launcher. Raises OSError."""
        process = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
        self._write("begun", {**process, "boot": boot_clock.boot_id(), "pid_namespace": pid_namespace()})

    def end(self, end: End) -> None:
        """Note how it ended. Raises OSError."""
        self._write("ended", end.as_json())

    def status(self) -> tuple[AttemptStatus, End | None]:
        """Return the status of the attempt, and its end if it has ended. Raises OSError."""
        fd = self._lock(fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask at the same time
        if fd is None:
            return "alive", None
        os.close(fd)
        if self.foreign_version() is not None:
            return "foreign", None
        if (end := End.from_json(self._read("ended"))) is not None:
            return "ended", end
        return ("lost" if self._file("begun").exists() else "not begun"), None

    def foreign_version(self) -> str | None:
        """Return the zlaunch that wrote its files, if that speaks another protocol than this one. Versions up
        to 0.2.0 wrote no number, and the same files.
        """
        for known in (self._read("begun"), self._read("ended")):
            if known.get("protocol", PROTOCOL) != PROTOCOL:
                return str(known.get("version", "?"))
        return None

    def process(self) -> Process | None:
        """Return its launcher; None before it has begun, and where its process id means nothing here."""
        known = self._read("begun")
        if not known or not self.is_here:
            return None
        return Process(known["pid"], known["start_ticks"])

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has not been booted since it began."""
        return bool(self._read("begun").get("boot", boot_clock.boot_id()) == boot_clock.boot_id())

    @property
    def is_here(self) -> bool:
        """Whether process ids of its launcher mean the same processes here."""
        namespace = self._read("begun").get("pid_namespace", pid_namespace())
        return self.is_of_this_boot and bool(namespace == pid_namespace())

    def lost_for_s(self) -> float:
        """Return for how long it has been known to be lost, and note that. Raises OSError."""
        known = self._read("lost")
        now = boot_clock.now_s()
        if known.get("boot") != boot_clock.boot_id() or not isinstance(known.get("since"), (int, float)):
            known = {"boot": boot_clock.boot_id(), "since": now}
            self._write("lost", known)
        return now - float(known["since"])

    def _lock(self, how: int) -> int | None:
        path = self._file("lock")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, how)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _file(self, kind: str) -> Path:
        return self.queue / _FOLDER / f"{self.job_id}.{self.number}.{kind}"

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        path = self._file(kind)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"protocol": PROTOCOL, "version": __version__, **content}))
        temporary.replace(path)

    def _read(self, kind: str) -> dict[str, Any]:
        try:
            content = json.loads(self._file(kind).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def forget(queue: Path, job_id: int) -> None:
    """Remove the files of a job's attempts."""
    for path in (queue / _FOLDER).glob(f"{job_id}.*"):
        path.unlink(missing_ok=True)


# -- wake -------------------------------------------------------------------------------------------
#
# Find the queue's folder, start its daemon where there is none, and wake it.


_LOCK = "daemon.lock"
_WAKE = "wake"
LOG = "daemon.log"
_START_S = 60.0
_OLDER_S = 10.0
"""Seconds in which the daemon of an older zlaunch ends that has met a job of this one."""
_TESTING_S = 0.5
"""How long others may hold the lock who only test whether there is a daemon."""
_POLL_S = 0.02


def queue_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's queue on this machine, which nobody else can read; create it.

    It is zlaunch/queue-HOST in $XDG_STATE_HOME or ~/.local/state. Raises LaunchError.
    """
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the specification has such a one ignored
        base = str(state_folder())
    path = Path(base, "zlaunch", f"queue-{socket.gethostname()}")
    try:
        make_folder(path)  # of another user (`sudo` with HOME): its jobs would run with this user's rights
        os.chmod(path, 0o700)
        try:
            os.mkfifo(path / _WAKE, 0o600)
        except FileExistsError:
            pass
    except OSError as error:
        raise LaunchError(
            f"the queue's folder {path}: {error.strerror}; XDG_STATE_HOME=DIR moves it"
        ) from None
    return path


def take_lock(folder: Path) -> int | None:
    """Become the queue's one daemon while the returned descriptor is open; None where there is another."""
    until = time.monotonic() + _TESTING_S
    while (fd := _lock(folder, fcntl.LOCK_EX)) is None:
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)
    here = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "pid_namespace": pid_namespace()}
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(here).encode(), 0)
    except OSError:  # a full disk: the lock counts
        pass
    return fd


def has_daemon(folder: Path) -> bool:
    """Tell whether there is a daemon."""
    fd = _lock(folder, fcntl.LOCK_SH)  # so that those who test are not in each other's way
    if fd is not None:
        os.close(fd)
    return fd is None


def _lock(folder: Path, kind: int) -> int | None:
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return fd


def is_mine(folder: Path, fd: int) -> bool:
    """Tell whether a descriptor is that of the folder's lock: the folder may have been removed."""
    try:
        there = os.stat(folder / _LOCK)
        here = os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def open_wake(folder: Path) -> int:
    """Open the daemon's end of what wakes it; it never blocks."""
    return os.open(folder / _WAKE, os.O_RDWR | os.O_NONBLOCK)


def wake(folder: Path) -> None:
    """Wake the daemon, if there is one."""
    try:
        fd = os.open(folder / _WAKE, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # nobody reads: there is no daemon
    try:
        os.write(fd, b"!")
    except OSError:
        pass  # it is full: the daemon will read it
    finally:
        os.close(fd)


def check_daemon(folder: Path) -> bool:
    """Tell whether there is a daemon. Raises LaunchError where none can be started."""
    try:
        if has_daemon(folder):
            return True
    except OSError as error:
        raise LaunchError(f"the queue's folder {folder}: {error.strerror}") from None
    if "ZLAUNCH_RUN_ID" in os.environ:
        raise LaunchError(
            "the queue's daemon cannot start inside a run, because it would end with the run: "
            "run `zlaunch queue` outside while a job is waiting"
        )
    return False


def replace_older_daemon(folder: Path) -> None:
    """Start a daemon after a job was added. The daemon of a zlaunch up to 0.2.0 ends when it reads a job of
    this one, and would start none. Raises LaunchError where it stays.
    """
    ensure_daemon(folder)
    until = time.monotonic() + _OLDER_S
    while has_daemon(folder) and not _is_current(folder):
        if time.monotonic() >= until:
            raise LaunchError(
                "the queue's daemon runs an older zlaunch and cannot start this job: wait until its jobs "
                "have ended, then run `zlaunch queue`"
            )
        time.sleep(_POLL_S)
    ensure_daemon(folder)


def _is_current(folder: Path) -> bool:
    """Tell whether the daemon has written down who it is, as versions after 0.2.0 do."""
    try:
        known = json.loads((folder / _LOCK).read_text())
        if known["pid_namespace"] != pid_namespace():
            return True  # its process id says nothing here
        return bool(start_ticks(known["pid"]) == known["start_ticks"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def ensure_daemon(folder: Path) -> None:
    """Wake the daemon; start one where there is none. Raises LaunchError."""
    if check_daemon(folder):
        wake(folder)
        return
    has_begun, says_so = os.pipe()
    with open(folder / LOG, "ab") as log, open(has_begun, "rb", 0) as ready:
        daemon = subprocess.Popen(
            [*python_module_argv("zlaunch.queue.daemon"), str(says_so)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(says_so,),
        )
        os.close(says_so)
        begun = bool(select.select([ready], [], [], _START_S)[0] and ready.read(1))
    if not begun:
        raise LaunchError(f"the queue's daemon (process {daemon.pid}) did not start: see {folder / LOG}")


# -- lost -------------------------------------------------------------------------------------------
#
# Tell when a run whose launcher was killed is over: only then may others have its slots.
#
# Its agents end the workers by themselves: on this machine when the launcher's pipe ends, on other hosts
# when
# their lease has run out (Note [Lease] in `zlaunch/node/lease.py`). Here /proc proves it.


_HERE = "localhost"
_AGENTS_S = 5.0
"""Seconds beyond the grace period in which agents on this machine have ended their workers."""
_SETTLING_S = 1.0
"""Seconds after which agents on this machine know that the launcher is gone, and start nothing more."""
_LEASE_S = 0.5
"""Seconds beyond the heartbeat at which a lease has run out for certain."""
_GRACE_S = 3.0
_HEARTBEAT_S = 60.0
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
    name = run_id(job)
    limit_s = grace_s(job) + _AGENTS_S
    if not attempt.is_here or not name:  # /proc does not show its processes
        return since_s >= limit_s
    if since_s >= limit_s:
        kill_leftovers(name)
    return not run_processes(name)


def _is_over_elsewhere(job: Job, lost_for_s: float) -> bool:
    if set(job.slots) <= {_HERE}:
        return True
    heartbeat_s = job.submission.heartbeat_s if isinstance(job, QueuedJob) else _HEARTBEAT_S
    return lost_for_s >= heartbeat_s + _LEASE_S


# -- judge ------------------------------------------------------------------------------------------
#
# Judge the end of an attempt: the job ends with it, or waits for another attempt. Pure.


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
    failures = job.failures
    refusals = job.refusals
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


# -- ending -----------------------------------------------------------------------------------------
#
# Settle how jobs of the queue stand, and end them. Whoever looks may do it: no daemon is needed.
#
# Note [Who settles]
# An attempt's lock and files say what has become of it, also after its daemon and its launcher were killed,
# or
# the machine was booted. The daemon and everyone who looks (`ps`, `wait`, `attach`, `logs`, `queue`, a
# sweep)
# draw the same conclusion and write it down. Each change of a row asks for the state that it was judged by:
# the
# first one wins, and what follows from it (the run's folder) is the winner's to do. The daemon alone starts
# jobs; where jobs wait and there is none, whoever looks starts one.


CANCELLED = 128 + signal.SIGTERM
"""Exit code of a run that was cancelled, as of one that `zlaunch stop` ends."""
_KILLED = 128 + signal.SIGKILL
_ORPHAN_S = 60.0
"""Seconds in which a run that is marked as queued has come into the queue, or never will."""
_ASK_S = 1.0
"""Seconds between questions about one run: who waits for it asks many times a second."""
_looked_at: dict[Path, float] = {}


def end_job(store: Store, folder: Path, job: Job, end: End, why: str, *, never_began: bool = False) -> bool:
    """End a job of the queue, also in its run's folder; False where it was in another state by now.

    `never_began`: its run says `why`, too. Only the queue knows.
    """
    if not store.end(job, end, why):
        return False
    run_dir = job.submission.run_dir if isinstance(job, QueuedJob) else job.run_dir
    if run_dir:
        run_folder.left_queue(Path(run_dir), end, why if never_began else "")
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
    status, end = attempt.status()
    if status == "alive":
        return None
    if status == "foreign":
        text = f"its files are of zlaunch {attempt.foreign_version()}, which this one cannot read"
        return _end(store, folder, job, End(1, "failed"), text)
    if end is None and status == "not begun" and exit_code is not None and exit_code >= 0:
        text = f"its launcher ended with exit code {exit_code} before it began; its console.log says why"
        refused = End(exit_code or 1, "refused")
        return text if end_job(store, folder, job, refused, text, never_began=True) else None
    if end is None and exit_code is not None:
        end = _unwritten(exit_code, has_begun=status != "not begun")
    if end is None and status == "lost":
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
        return "".join(f"; {place} rests for {store.back_off(place):g} s" for place in places)
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
    # Whoever settles a job tells the log: the daemon then finds nothing left to settle, and says nothing.
    try:
        said = settle_attempt(store, folder, job)
        if said:
            with open(folder / LOG, "a") as log:
                say(f"job {job.id}: {said}", log)
    except OSError:
        pass


def settle(found: FoundRun) -> FoundRun:
    """Return a run as it stands, also where it is marked as queued: its queue may not know it, may have done
    with it, or its daemon and its launcher may have been killed.
    """
    now = time.monotonic()
    if found.state != "queued" or now - _looked_at.get(found.path, -math.inf) < _ASK_S:
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
    has_checked = False
    problem = ""
    settled = []
    for run, waits in zip(runs, queued, strict=True):
        if not waits:
            settled.append(run)
            continue
        job = jobs.get(str(run.path.resolve())) or store.of_run(run.path)
        if isinstance(job, QueuedJob) and job.state == "waiting":
            if not has_checked:
                has_checked = True
                problem = _check_daemon(folder)
            settled.append(replace(run, note=problem) if problem else run)
        else:
            settled.append(_settled(store, folder, run, job))
    return settled


def _run_dir(job: Job) -> str:
    return job.submission.run_dir if isinstance(job, QueuedJob) else job.run_dir


def _settled(store: Store, folder: Path, run: FoundRun, job: Job | None) -> FoundRun:
    if job is None:
        if time.time() - run.record.started > _ORPHAN_S:
            run_folder.left_queue(run.path, End(1, "failed"))
        return run.now()
    if job.state == "running":
        _settle(store, folder, job)
        job = store.find(job.id)
    if job is None or job.state == "ended":  # its folder could not be written then
        end = job.end if isinstance(job, QueuedJob) else None
        code = 1 if job is None or job.exit_code is None else job.exit_code
        run_folder.left_queue(run.path, end or End.of_code(code))
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


# -- stop -------------------------------------------------------------------------------------------
#
# Stop launchers of the queue: ask, ask again, kill. Every stop ends, also that of a launcher that hangs.
#
# Note [A stop escalates]
# SIGTERM has the launcher stop its workers within the grace period. One that has not ended _PATIENCE_S
# seconds
# after that gets SIGCONT (it may have been suspended) and a second SIGTERM, with which it kills at once.
# After
# another _PATIENCE_S seconds it is killed, and so is what it leaves on this machine. Then the slots are
# free.


_PATIENCE_S = 10.0


@dataclass(slots=True)
class Stops:
    """Remembers the stops of one daemon. A daemon that follows begins to count anew."""

    _asked_at: dict[tuple[int, int], float] = field(default_factory=dict)
    """Job and attempt -> when it was first asked to end (monotonic seconds)."""
    _steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """Job and attempt -> how many of the steps it has had."""

    def ask(self, job: Job, process: Process) -> None:
        """Ask a launcher for the first time."""
        kill(process, signal.SIGTERM)
        self.watch(job)

    def watch(self, job: Job) -> None:
        """Count from now for a launcher that somebody has asked."""
        self._asked_at.setdefault((job.id, job.attempt), time.monotonic())

    def insist(self, job: Job, process: Process) -> str | None:
        """Take the next step where it is time for it; return what to say of it."""
        self.watch(job)
        key = job.id, job.attempt
        done = self._steps.get(key, 0)
        if self.next_s(job) > 0:
            return None
        self._steps[key] = done + 1
        if done == 0:
            kill(process, signal.SIGCONT)
            kill(process, signal.SIGTERM)
            return "its launcher does not end: asked again"
        kill(process, signal.SIGKILL)
        if name := run_id(job):
            kill_leftovers(name)
        return "its launcher does not end: killed"

    def next_s(self, job: Job) -> float:
        """Return the seconds until the next step of a stop."""
        key = job.id, job.attempt
        steps = self._steps.get(key, 0) + 1
        due = self._asked_at.get(key, time.monotonic()) + grace_s(job) + steps * _PATIENCE_S
        return due - time.monotonic()

    def forget(self, job_id: int) -> None:
        """Forget a job that has ended."""
        self._asked_at = {key: at for key, at in self._asked_at.items() if key[0] != job_id}
        self._steps = {key: count for key, count in self._steps.items() if key[0] != job_id}


# -- daemon -----------------------------------------------------------------------------------------


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
        self._folder = folder
        self._store = store
        self._lock = lock
        self._wake = open_wake(folder)
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
        process = self._attempt(job).process()
        now = time.monotonic()
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
        backing_off = self._store.backing_off()
        if backing_off:
            self._look_within(min(backing_off.values()))
        chosen = schedule.decide(
            [schedule.Waiting(job.id, job.submission.priority, job.submission.demand) for job in waiting],
            [_as_running(job) for job in running],
            backing_off,
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
            known = run_folder.read(path)
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
        if known.state != "ended" and end_job(
            self._store, self._folder, known, _REFUSED, why, never_began=True
        ):
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


def say(text: str, log: TextIO | None = None) -> None:
    """Write a line into the daemon's log, which is the daemon's stdout."""
    try:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=log, flush=True)
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
