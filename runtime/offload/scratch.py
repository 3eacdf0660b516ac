"""Makes a folder on the NVMe drive that belongs to one process and is removed after it."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from weakref import WeakSet

from ..errors import DiskError

_PREFIX = "zlaunch-"
_LOCK = "lock"
_UNLOCKED_FOR_S = 600.0
"""Sets the age from which a folder without a lock is removed: a younger one is about to be locked."""


class ScratchFolder:
    """Keeps ``<root>/zlaunch-<host>-rank<r>-<random>``, locked while this process lives, removed at its end.

    The name is unique, so two jobs on one drive never meet. The kernel drops a lock with its process, however
    that dies; the next run in this ``root`` on this host removes folders whose lock is not held.
    """

    def __init__(self, root: str | os.PathLike[str], rank: int) -> None:
        """Make and lock the folder. Raises DiskError where ``root`` cannot be made or written."""
        self.root = Path(os.path.expanduser(root))
        host = socket.gethostname().partition(".")[0]
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.swept = sweep(self.root, host)
            self.path, self._lock = _make(self.root, f"{_PREFIX}{host}-rank{rank}-")
        except OSError as error:
            raise DiskError(
                error.errno, f"nvme_path {self.root}: cannot be used for offload: {error.strerror}"
            ) from None
        self._owner = os.getpid()
        atexit.register(self.remove)
        _folders.add(self)
        _remove_on_sigterm()

    def remove(self) -> None:
        """Delete the folder. Called at exit, too; a forked child does not delete it."""
        if self._lock < 0 or os.getpid() != self._owner:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        atexit.unregister(self.remove)


_folders: WeakSet[ScratchFolder] = WeakSet()


def _remove_on_sigterm() -> None:
    """Remove the folders at SIGTERM, too, which by default ends a process without its exit functions."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, frame: object) -> None:
        for folder in list(_folders):
            folder.remove()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def _make(root: Path, prefix: str) -> tuple[Path, int]:
    """Make a new folder; return it and the descriptor of its lock, held."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.stat(path / _LOCK).st_ino == os.fstat(lock).st_ino:
                return path, lock
            os.close(lock)
        except FileNotFoundError:
            pass  # a sweep came between the file and its lock


def sweep(root: Path, host: str) -> list[Path]:
    """Remove the folders that dead processes of ``host`` left in ``root``; return their paths."""
    removed = []
    for folder in root.glob(f"{_PREFIX}{host}-rank*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if _age_s(folder) < _UNLOCKED_FOR_S:
                continue
            lock = -1
        except OSError:
            continue  # another user's
        try:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            continue  # alive
        finally:
            if lock >= 0:
                os.close(lock)
    return removed


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
