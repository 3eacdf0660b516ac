"""Find the queue's folder, start its daemon where there is none, and wake it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from zlaunch.errors import LaunchError
from zlaunch.runtime.trust import make_folder
from zlaunch.system.processes import pid_namespace, python_module_argv, start_ticks
from zlaunch.system.user import state_folder

_LOCK, _WAKE = "daemon.lock", "wake"
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
        there, here = os.stat(folder / _LOCK), os.fstat(fd)
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
