"""Reads and writes files past the page cache, many blocks at a time. No torch: buffers are plain memory.

O_DIRECT wants addresses, lengths and offsets that are multiples of the disk's block. `aligned_buffer` gives
such memory, and files are laid out in multiples of ALIGN_BYTES. `os.preadv` and `os.pwritev` release the GIL,
so a few threads keep a disk as busy as a queue of asynchronous requests would.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import mmap
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakSet

from ..errors import DiskError
from ..threads import thread_pool

# -- disk -------------------------------------------------------------------------------------------


ALIGN_BYTES = 4096


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned_buffer(nbytes: int) -> memoryview:
    """Return page-aligned, zeroed memory of ``aligned(nbytes)`` bytes; in huge pages, which direct transfers
    pin faster (a third more bandwidth was measured).
    """
    # private: shared memory gets no huge pages
    memory = mmap.mmap(-1, max(ALIGN_BYTES, aligned(nbytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class ScratchFile:
    """Keeps an open file for transfers; unbuffered where the file system allows it."""

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        """Open the file; create it if it does not exist. Raises DiskError.

        A file system without O_DIRECT (tmpfs) is used through the page cache; ``direct`` then says False.
        """
        self.path = Path(path)
        self.reserved_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = direct
        try:
            try:
                self.fd = os.open(self.path, flags | (os.O_DIRECT if direct else 0), 0o600)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                self.direct = False
                self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise DiskError(error.errno, f"{self.path}: cannot be opened: {error.strerror}") from None

    def reserve(self, nbytes: int) -> int:
        """Have the file system allocate ``nbytes`` more now, not in the middle of a step; return their
        offset. Raises DiskError.
        """
        offset = self.reserved_bytes
        size = aligned(nbytes)
        try:
            os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise DiskError(error.errno, f"{self.path}: {_explain(error, nbytes)}") from None
            # The file gets its size all the same: check() compares it, and a write behind the end would leave
            # a hole.
            os.ftruncate(self.fd, offset + size)
        self.reserved_bytes += size
        return offset

    def check(self) -> None:
        """Raise DiskError if the file is shorter than what was reserved: a write would extend it again, with
        a hole that reads as zeros.
        """
        size = os.fstat(self.fd).st_size
        if size < self.reserved_bytes:
            raise DiskError(errno.EIO, f"{self.path}: ends at byte {size}: another process truncated it")

    def close(self) -> None:
        """Close the file, which stays on disk."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _explain(error: OSError, nbytes: int) -> str:
    if error.errno == errno.ENOSPC:
        amount = f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
        return f"no space left for {amount}: free space, or use another nvme_path"
    return error.strerror or str(error)


class DiskWaits:
    """Adds up the seconds that the main thread has waited for disks."""

    seconds = 0.0


waited = DiskWaits()
"""Counts for this process."""


class DiskTransfer:
    """Represents a read or a write under way, in blocks."""

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Tell whether ``wait`` would return at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Wait until every block is transferred; raises the DiskError of the first block that failed, at
        every call.
        """
        start = time.perf_counter()
        # All of them, even after an error: a block that still moves would use a buffer that is lent again.
        for part in self._parts:
            error = part.exception()
            self._error = self._error or error
        self._parts = ()
        if threading.current_thread() is threading.main_thread():
            waited.seconds += time.perf_counter() - start
        if self._error is not None:
            raise self._error


class DiskEngine:
    """Moves blocks between memory and files by a few threads.

    ``block_bytes`` is the size of one request, ``threads`` the number of requests under way at once.
    """

    def __init__(self, *, block_bytes: int = 1 << 20, threads: int = 4) -> None:
        if block_bytes % ALIGN_BYTES or block_bytes <= 0:
            raise ValueError(f"block_size {block_bytes}: must be a positive multiple of {ALIGN_BYTES}")
        self.block_bytes = block_bytes
        self.threads = threads
        self._pool = thread_pool(threads, "zlaunch-disk")
        self._lock = threading.Lock()
        self.read_bytes = self.written_bytes = 0

    def read(self, file: ScratchFile, buffer: memoryview, offset: int = 0) -> DiskTransfer:
        """Start to fill ``buffer`` from the file. Memory, length and offset must be aligned."""
        return self._start(file, buffer, offset, self._read_block)

    def write(
        self,
        file: ScratchFile,
        buffer: memoryview,
        offset: int = 0,
        *,
        after: Callable[[], None] | None = None,
    ) -> DiskTransfer:
        """Start to write ``buffer`` to the file, once ``after`` has returned; it must stay untouched until
        the transfer is waited for.
        """

        def write_block(file: ScratchFile, block: memoryview, offset: int) -> None:
            if after is not None:
                after()
            self._write_block(file, block, offset)

        return self._start(file, buffer, offset, write_block)

    def _start(
        self,
        file: ScratchFile,
        buffer: memoryview,
        offset: int,
        move: Callable[[ScratchFile, memoryview, int], None],
    ) -> DiskTransfer:
        if len(buffer) % ALIGN_BYTES or offset % ALIGN_BYTES:
            raise ValueError(f"{file.path}: {len(buffer)} bytes at {offset} are not aligned")
        # Here, in the caller's thread: the error comes before any block has moved.
        file.check()
        parts = []
        for start in range(0, len(buffer), self.block_bytes):
            block = buffer[start : start + self.block_bytes]
            parts.append(self._pool.submit(move, file, block, offset + start))
        return DiskTransfer(parts)

    def _read_block(self, file: ScratchFile, block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            try:
                count = os.preadv(file.fd, [block[done:]], offset + done)
            except OSError as error:
                raise DiskError(
                    error.errno, f"{file.path}: read of {len(block)} bytes at {offset}: {error.strerror}"
                ) from None
            if count == 0:
                raise DiskError(
                    errno.EIO, f"{file.path}: ends at byte {offset + done}: another process truncated it"
                )
            done += count
        with self._lock:
            self.read_bytes += len(block)

    def _write_block(self, file: ScratchFile, block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            try:
                done += os.pwritev(file.fd, [block[done:]], offset + done)
            except OSError as error:
                raise DiskError(error.errno, f"{file.path}: {_explain(error, len(block))}") from None
        with self._lock:
            self.written_bytes += len(block)

    def close(self) -> None:
        """End the threads; transfers under way are finished first."""
        self._pool.shutdown()


# -- scratch ----------------------------------------------------------------------------------------
#
# Makes a folder on the NVMe drive that belongs to one process and is removed after it.


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
    # A handler of the script or of the worker ends the process in another way, with its exit functions.
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, frame: object) -> None:
        for folder in list(_folders):
            folder.remove()
        signal.signal(number, signal.SIG_DFL)
        # By the signal itself: the parent has to see that it has ended the process.
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def _make(root: Path, prefix: str) -> tuple[Path, int]:
    """Make a new folder; return it and the descriptor of its lock, held."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A sweep may have locked and removed the folder between the open and the lock. Then this lock is
            # on a file without a name.
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
