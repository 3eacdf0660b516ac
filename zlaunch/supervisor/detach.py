"""Let a launch go on by itself, in a session of its own that no terminal ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from zlaunch.runtime.trust import Folder

CONSOLE_LOG = "console.log"
"""File in a run's folder that has what a detached launch would have shown."""
_ASK_S = 5.0


def into_background(run_dir: Path, begin: Callable[[], None]) -> bool:
    """Continue in a new process; return True in it, and False in this one, which may end.

    The new process belongs to no terminal; its output goes into the run's console log. It has called
    ``begin`` when this one goes on. Call this while there is one thread. Raises OSError.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with Folder(run_dir) as folder:
        log = os.open(folder.path / CONSOLE_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    has_begun, says_so = os.pipe()
    child = os.fork()
    if child:
        os.close(log)
        os.close(says_so)
        os.waitpid(child, 0)
        os.read(has_begun, 1)
        os.close(has_begun)
        return False
    os.close(has_begun)
    os.setsid()
    if os.fork():
        os._exit(0)  # so that the one that goes on is nobody's child, and can take no terminal
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.close(nothing)
    os.close(log)
    begin()
    os.close(says_so)
    return True


def ended_at_logout() -> str | None:
    """Return what a user has to do whose processes systemd ends at logout; None if it does not."""
    groups = Path("/proc/self/cgroup")
    if not Path("/run/systemd/system").is_dir() or not groups.exists():
        return None
    return advice(groups.read_text(), kills=_kills_processes(), lingers=_lingers())


def advice(cgroup: str, *, kills: bool, lingers: bool) -> str | None:
    """Return what helps against the end at logout. ``cgroup``: what /proc/self/cgroup says of this process;
    ``kills``: logind's KillUserProcesses; ``lingers``: the user's services go on without a session.
    """
    in_session = ".scope" in cgroup and "/session-" in cgroup
    in_manager = "/user@" in cgroup
    if lingers and in_manager:
        return None
    if in_session and kills:
        first = "" if lingers else "`loginctl enable-linger` once, then "
        return (
            "systemd ends this run when you log out (KillUserProcesses=yes in logind.conf): start it with "
            f"{first}`systemd-run --user --scope --quiet zlaunch --detach ...`"
        )
    if in_manager:
        return "systemd ends this run when your last session ends: `loginctl enable-linger` once"
    return None


def _kills_processes() -> bool:
    """Ask logind; it may leave out root and others, whom its configuration names."""
    name = "org.freedesktop.login1"
    words = ("get-property", name, "/org/freedesktop/login1", f"{name}.Manager", "KillUserProcesses")
    return os.geteuid() != 0 and _said("busctl", *words) == "b true"


def _lingers() -> bool:
    return _said("loginctl", "show-user", str(os.geteuid()), "--property=Linger", "--value") == "yes"


def _said(*command: str) -> str:
    """Return what a program prints; nothing where it cannot be run."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
