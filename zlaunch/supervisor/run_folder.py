"""Create the folder of a run, prove that it takes files, and lock it against a second launch."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from zlaunch.errors import LaunchError
from zlaunch.runtime.trust import UntrustedError, make_folder
from zlaunch.supervisor import run_record

_PROBE_BYTES = 1 << 16
_ENDING_S = 2.0
"""How long a launcher that has ended may still hold the folder."""


def make_run_dir(path: Path, *, shared: bool = False) -> int | None:
    """Create the folder for logs and prove that it takes files. The returned descriptor keeps other launches
    out while it is open.

    `shared`: launchers of other nodes, which are parts of this run, may use it too (and two pods may have one
    host's name), and they are not kept out. Raises LaunchError.
    """
    known = None if shared else run_record.read(path)
    if known is not None and known.host == socket.gethostname() and known.is_running():
        raise LaunchError(f"--run_dir {path}: a job is running there (process {known.pid})")
    try:
        make_folder(path)
        (path / "logs").mkdir(exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))  # an empty file can be made on a full disk
        finally:
            probe.unlink(missing_ok=True)
    except UntrustedError as error:
        raise LaunchError(f"--run_dir {error}; or use another folder") from None
    except OSError as error:
        raise LaunchError(f"--run_dir {path}: cannot write there: {error.strerror}") from None
    if shared:
        return _lock(path, fcntl.LOCK_SH)
    # A launcher that ends closes its files one by one: its queue may start the next attempt in between.
    until = time.monotonic() + _ENDING_S
    while (lock := _lock(path)) is None:
        if time.monotonic() >= until:
            raise LaunchError(f"--run_dir {path}: another launch has just started there")
        time.sleep(0.02)
    return lock


def drop_unused(path: Path) -> None:
    """Remove a run's folder that no other launch uses, if nothing was written there."""
    with suppress(OSError):
        (path / "logs").rmdir()
        path.rmdir()


def name_of(path: Path) -> str:
    """Return what a run is called here: its folder's name, or the way to it where it is not under `runs`."""
    return path.name if path.parent == Path("runs").absolute() else os.path.relpath(path)


def point_latest(path: Path) -> None:
    """Let `latest`, beside a run's folder, be a link to it. Where that cannot be, it is not."""
    link, new = path.parent / "latest", path.parent / f".latest-{os.getpid()}"
    try:
        if link.is_symlink() or not link.exists():
            new.symlink_to(path.name, target_is_directory=True)
            new.replace(link)
    except OSError:
        new.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Tell whether a launch holds a run's folder."""
    fd = _lock(path)
    if fd is not None:
        os.close(fd)
    return fd is None


def _lock(path: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """Lock a run's folder while the returned descriptor is open; None where another launch has locked it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a file system without locks
        pass
    return fd
