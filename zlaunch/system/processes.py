"""Find, watch and end the processes of one run, with /proc and a few system calls alone.

A process belongs to a run when its environment says so, when it sits in the session of a worker that still is
that worker, or when it descends from the agent or its watchdog (which adopt orphans). A process id alone is
never enough: it may belong to another process by now.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals handed on to the workers: "save and stop", and "show your stacks"."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SCAN_PAUSE_S = 0.02
_LOWEST_PRIORITY = 19


class Process(NamedTuple):
    """Names a process so that it cannot be mistaken for a later one with an equal id."""

    pid: int
    start_ticks: int


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and requests to end until the block is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent dies, also when it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def yield_to_others(pid: int) -> None:
    """Give a process the lowest priority, also against processes of other sessions, as far as it goes."""
    for act in (
        lambda: os.setpriority(os.PRIO_PROCESS, pid, _LOWEST_PRIORITY),
        lambda: Path(f"/proc/{pid}/autogroup").write_text(str(_LOWEST_PRIORITY)),  # of the whole session
    ):
        with suppress(OSError):
            act()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None on kernels before 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def python_module_argv(module: str) -> tuple[str, ...]:
    """Return `python -m module`, with the current folder kept off its import path where that can be done.

    A user's own `queue.py` or `zlaunch/` in the working folder must not get in the way. From our own checkout
    the current folder may be the only way in.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    safe = sys.version_info >= (3, 11) and os.getcwd() != root
    return (sys.executable, *(["-P"] if safe else []), "-m", module)


def _stat_fields(pid: int) -> list[bytes]:
    """Read /proc/PID/stat from the third field (state) on; the name before it may hold anything."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None when there is no such process."""
    try:
        fields = _stat_fields(pid)
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError):
        return None


def pid_namespace() -> int:
    """Return the number of this process's pid namespace; 0 where /proc does not say it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_stopped(process: Process) -> bool:
    """Tell whether a signal has stopped a process (SIGSTOP)."""
    try:
        fields = _stat_fields(process.pid)
        return fields[0] == b"T" and int(fields[19]) == process.start_ticks
    except (OSError, IndexError):
        return False


def run_processes(
    run_id: str | None = None,
    sessions: Collection[Process] = (),
    *,
    ancestor: int | None = None,
    spared: Collection[int] = (),
) -> list[Process]:
    """List every living process of the run, except this one.

    `run_id` is looked for in environments, `sessions` are leaders of sessions, `ancestor` is a process whose
    descendants count, but for those `spared` and their descendants. A session whose leader's id belongs to a
    later process is not the run's any more.
    """
    marker = b"\0ZLAUNCH_RUN_ID=" + os.fsencode(run_id) + b"\0" if run_id is not None else None
    own = os.getpid()
    start: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    members: dict[int, list[int]] = {leader.pid: [] for leader in sessions}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        try:
            fields = _stat_fields(pid)
            if fields[0] in (b"Z", b"X"):
                continue
            start[pid] = int(fields[19])
            children.setdefault(int(fields[1]), []).append(pid)
            if int(fields[3]) in members:
                members[int(fields[3])].append(pid)
            if marker is None:
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marker in b"\0" + file.read() + b"\0":
                    found.add(pid)
        except (OSError, IndexError):  # it has just ended, or is another user's
            continue
    for leader in sessions:
        if start.get(leader.pid, leader.start_ticks) == leader.start_ticks:
            found.update(members[leader.pid])
    todo = [] if ancestor is None else list(children.get(ancestor, ()))
    while todo:
        pid = todo.pop()
        if pid != own and pid not in spared:
            found.add(pid)
            todo += children.get(pid, ())
    return [Process(pid, start[pid]) for pid in found - {own, *spared}]


def kill(process: Process, signum: int = signal.SIGKILL) -> None:
    """Signal exactly this process; nothing happens when it is gone or its id belongs to another by now."""
    pidfd = open_pidfd(process.pid)
    try:
        if int(_stat_fields(process.pid)[19]) == process.start_ticks:
            if pidfd is None:
                os.kill(process.pid, signum)
            else:
                signal.pidfd_send_signal(pidfd, signum)
    except (OSError, IndexError):
        pass
    finally:
        if pidfd is not None:
            os.close(pidfd)


def signal_name(signum: int) -> str:
    """Return a signal's name: SIGKILL for 9; the number where there is no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def signal_groups(group_ids: Iterable[int], signum: int) -> None:
    """Signal process groups; those that are gone are passed over."""
    for group in group_ids:
        try:
            os.killpg(group, signum)
        except OSError:
            pass


def kill_leftovers(
    run_id: str | None = None,
    sessions: Collection[Process] = (),
    *,
    ancestor: int | None = None,
    spared: Collection[int] = (),
    reap: Callable[[], object] = lambda: None,
    timeout_s: float = 5.0,
) -> int:
    """Kill the processes that are left of a run, and return how many were found.

    It looks until two scans in a row find none: a process that forks faster than we kill shows up in the
    next. The time is bounded because a process stuck in the kernel cannot be killed.
    """
    seen: set[Process] = set()
    deadline = time.monotonic() + timeout_s
    empty_scans = 0
    while empty_scans < 2 and time.monotonic() < deadline:
        found = run_processes(run_id, sessions, ancestor=ancestor, spared=spared)
        for process in found:
            kill(process)
        reap()
        seen.update(found)
        empty_scans = 0 if found else empty_scans + 1
        if empty_scans < 2:
            time.sleep(_SCAN_PAUSE_S)
    return len(seen)
