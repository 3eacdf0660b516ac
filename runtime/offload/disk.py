"""Reads and writes files past the page cache, many blocks at a time. No torch: buffers are plain memory.

O_DIRECT wants addresses, lengths and offsets that are multiples of the disk's block. `aligned_buffer` gives
such memory, and files are laid out in multiples of ALIGN_BYTES. `os.preadv` and `os.pwritev` release the GIL,
so a few threads keep a disk as busy as a queue of asynchronous requests would.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..errors import DiskError

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
        offset, size = self.reserved_bytes, aligned(nbytes)
        try:
            os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise DiskError(error.errno, f"{self.path}: {_explain(error, nbytes)}") from None
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
        self.block_bytes, self.threads = block_bytes, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zlaunch-disk")
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
