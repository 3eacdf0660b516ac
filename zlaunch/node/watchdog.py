"""Watch over an agent: its tiny parent cleans up when the agent itself is killed with SIGKILL.

PDEATHSIG takes the workers down then, but not what they forked. The watchdog adopts what becomes an orphan,
so that nothing of the run, whatever its environment and session, gets out of its sight. When the watchdog
itself is killed, the agent gets SIGTERM and ends the run.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType
from typing import NoReturn

from zlaunch.system import machine
from zlaunch.system.processes import (
    Process,
    adopt_orphans,
    die_with_parent,
    is_stopped,
    kill,
    kill_leftovers,
    open_pidfd,
    start_ticks,
)

_PASSED = (signal.SIGTERM, signal.SIGHUP)
_LOOK_MS = 1000
_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def fork_under_watchdog() -> int:
    """Fork, and return the parent's process id in the child; the parent stays behind as its watchdog.

    Call it before threads, workers, or other descriptors exist.
    """
    adopt_orphans()
    watchdog = os.getpid()
    # Before the fork: the agent uses the folder, and the watchdog, which outlives it, removes it.
    memory_folder = machine.new_folder(watchdog)
    child = os.fork()
    if child:
        _watch_over(child, memory_folder)
    # Signals to the watchdog's process group are not meant for the agent too: the watchdog passes them on.
    os.setsid()
    die_with_parent(watchdog, signal.SIGTERM)
    os.environ["ZLAUNCH_MEMORY_DIR"] = memory_folder
    return watchdog


def _watch_over(child: int, memory_folder: str) -> NoReturn:
    """Wait for the agent, end what it has left, and end as it did."""
    # Exit code 1, for an error before the agent's status is known.
    status = 1 << 8
    try:
        agent = Process(child, start_ticks(child) or 0)

        def pass_on(signum: int, _frame: FrameType | None) -> None:
            kill(agent, signum)

        for signum in _PASSED:
            signal.signal(signum, pass_on)
        for signum in _IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        # Kept to see the launcher hang up, while the agent cannot. The other copies of the agent's pipes are
        # closed, so that the launcher sees the end of the agent's output.
        launcher = os.dup(0)
        null = os.open(os.devnull, os.O_RDWR)
        for stdio in (0, 1, 2):
            os.dup2(null, stdio)
        _disguise()
        _await_end(agent, launcher)
        os.close(launcher)  # who writes to a dead agent is to be told
        pid = 0
        while pid != child:
            # Of any child: orphans that were adopted have to be reaped, too.
            pid, status = os.waitpid(-1, 0)
        if not _reap():
            kill_leftovers(ancestor=os.getpid(), reap=_reap)
    finally:
        machine.remove(memory_folder)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            # End by the agent's signal: whoever waits for this process sees how the agent ended.
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 1)


def _await_end(agent: Process, launcher: int) -> None:
    """Wait until the agent ends. A stopped one (SIGSTOP) cannot see its launcher hang up: it goes on then."""
    pidfd = open_pidfd(agent.pid)
    if pidfd is None:
        return
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(launcher, 0)  # hanging up is reported in any case
    pause_ms: int | None = None
    while pidfd not in (ready := {fd for fd, _ in poller.poll(pause_ms)}):
        if launcher in ready:
            # poll() reports a hang-up each time, so this would not wait any more.
            poller.unregister(launcher)
            pause_ms = _LOOK_MS
        if pause_ms is not None and is_stopped(agent):
            kill(agent, signal.SIGCONT)
    os.close(pidfd)


def _reap() -> bool:
    """Take the status of adopted children that have ended; True when there is no child left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _disguise() -> None:
    """Take another name and blank the inherited environment.

    A kill of the agent by its command line must not hit its watchdog, and a watchdog inside another zlaunch
    run must not look like a process of that run.
    """
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as file:
            # The name in parentheses may contain spaces and parentheses itself.
            fields = file.read().rpartition(b")")[2].split()
        arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    except (OSError, ValueError):
        return
    name = b"zwatchdog"
    if 0 < arg_start < arg_end - len(name):
        ctypes.memset(arg_start, 0, arg_end - arg_start)
        ctypes.memmove(arg_start, name, len(name))
    if 0 < env_start < env_end:
        ctypes.memset(env_start, 0, env_end - env_start)
