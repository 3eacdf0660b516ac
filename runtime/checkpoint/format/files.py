"""Writes one safetensors file as a stream, past the page cache, with a checksum for every chunk."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...comm.pending import DONE, Pending
from ...offload.disk import ALIGN_BYTES, aligned
from ...offload.transfer import HostLink
from ...threads import make_thread
from .tensor_file import CHUNK_BYTES, NAMES, CheckpointError, header_of

_BUFFERS = 8
"""Chunks in memory: some are filled while others are summed and written."""
_THREADS = 4


class FileWriter:
    """Writes tensors whose dtypes and shapes are known beforehand, one after the other, in pieces.

    Threads compute the checksums and write, so that a disk is kept busy while the next chunk is copied; from
    a GPU on a separate stream. Memory: eight chunks. Errors are raised by a later call, at the latest by
    :meth:`close`.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], link: HostLink
    ) -> None:
        """Create the file for ``tensors``, in the order in which they will come; ``link`` has memory for them
        and copies them from its device. Raises OSError, CheckpointError for a dtype that safetensors does not
        have.
        """
        for name, (dtype, _) in tensors.items():
            if dtype not in NAMES:
                raise CheckpointError(
                    f"{path}: {name} is {dtype}, which the safetensors format does not have"
                )
        self.path = path
        self._left = deque((name, math.prod(shape), dtype) for name, (dtype, shape) in tensors.items())
        self._missing = 0
        self._dtype = torch.uint8
        header = header_of(tensors, {})
        total = len(header) + sum(numel * dtype.itemsize for _, numel, dtype in self._left)
        self._sums: dict[int, int] = {}
        self._error: Exception | None = None
        self._filled = self._chunk = self.nbytes = 0
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._jobs: SimpleQueue[tuple[Tensor, int, int, Pending] | None] = SimpleQueue()
        self._link = link
        self._arrival: Pending = DONE
        """The copy into the present buffer that was started last; copies end in their order."""
        self._memory: Tensor | None = None
        self._threads: list[Thread] = []
        self._fd, self._direct = _create(path)
        try:
            # One more than is used, because _cut() starts at a multiple of CHUNK_BYTES.
            self._memory = link.empty((_BUFFERS + 1) * CHUNK_BYTES, torch.uint8)
            for buffer in _cut(self._memory):
                self._free.put(buffer)
            self._buffer = self._free.get()
            self._threads = _start(self._work)
            _reserve(self._fd, total)
            self._append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        except Exception as error:
            if isinstance(error, OSError):
                error.filename = str(path)
            self.abandon()
            raise

    def write(self, name: str, piece: Tensor) -> None:
        """Append a piece of a tensor, or all of it; tensors come in the order that was announced. One on a
        GPU may change only after :meth:`close`, or behind ``link.after_downloads``. Raises OSError.
        """
        if not piece.numel():
            return
        while not self._missing:
            announced, self._missing, self._dtype = self._left.popleft()
            assert announced == name or not self._missing, f"{name} before {announced}"
        assert piece.dtype == self._dtype and piece.numel() <= self._missing, f"{name}: {piece.dtype}"
        self._missing -= piece.numel()
        self._append(piece.detach().contiguous().view(-1).view(torch.uint8))

    def _append(self, data: Tensor) -> None:
        at = 0
        while at < data.numel():
            count = min(data.numel() - at, CHUNK_BYTES - self._filled)
            part = self._buffer[self._filled : self._filled + count]
            if data.is_cuda:
                self._arrival = self._link.download(data[at : at + count], part)
            else:  # by one thread: torch's own would take the processors from the checksums
                np.copyto(part.numpy(), data[at : at + count].numpy())
            self._filled += count
            at += count
            if self._filled == CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Hand the present buffer to the threads and take a free one."""
        # A thread's error. Stop here, not at close(): the rest would be copied for nothing.
        if self._error is not None:
            raise self._error
        job = self._buffer, self._filled, self._chunk, self._arrival
        # Without threads (the interpreter is ending), the caller writes.
        if self._threads:
            self._jobs.put(job)
        else:
            self._do(*job)
        self._arrival = DONE
        self.nbytes += self._filled
        self._chunk += 1
        self._filled = 0
        # Blocks while all chunks are being written, which bounds the memory. _do() returns a chunk even after
        # an error; otherwise this would wait forever.
        self._buffer = self._free.get()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)

    def _do(self, buffer: Tensor, nbytes: int, chunk: int, arrival: Pending) -> None:
        try:
            arrival.wait()
            if self._error is None:
                self._store(buffer, nbytes, chunk)
        except (
            Exception
        ) as error:  # a device that has failed, too: the thread that waits for the buffer has to hear of it
            if isinstance(error, OSError):
                error.filename = str(self.path)
            self._error = self._error or error
        self._free.put(buffer)

    def _store(self, buffer: Tensor, nbytes: int, chunk: int) -> None:
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type, unused-ignore]
        self._sums[chunk] = zlib.crc32(memory[:nbytes])
        direct = self._direct
        done = 0
        while done < (end := aligned(nbytes) if direct else nbytes):
            try:
                done += os.pwrite(self._fd, memory[done:end], chunk * CHUNK_BYTES + done)
            except OSError as error:
                # The chunk is written again from `done`, without O_DIRECT and the padding.
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = self._direct = False  # a file system that only seemed to allow it
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def close(self) -> dict[str, Any]:
        """Bring everything to the disk, and return its size and checksums. Raises OSError."""
        try:
            assert not self._missing and not any(numel for _, numel, _ in self._left), f"left: {self._left}"
            if self._filled:
                # A direct write has a multiple of ALIGN_BYTES. The excess is cut off below.
                if self._direct and self._filled % ALIGN_BYTES:
                    self._buffer[self._filled : aligned(self._filled)].zero_()
                self._flush()
            self._end_threads()
            if self._error is not None:
                raise self._error
            # See Note [Atomic saves] in commit.py: no manifest before the content of its files.
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        finally:
            self.abandon()
        return {"bytes": self.nbytes, "crc32": [self._sums[chunk] for chunk in range(self._chunk)]}

    def abandon(self) -> None:
        """End the threads and close the file, whole or not."""
        self._end_threads()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        memory = self._memory
        self._memory = None
        if memory is not None:
            with suppress(RuntimeError):  # of a device that has failed: the copies' waits have told of it
                self._link.release(memory)

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def _start(work: Callable[[], None]) -> list[Thread]:
    """Start the threads of a file; none where the interpreter ends, with a last save still under way.

    Plain threads: an executor refuses work then. From Python 3.12 on no thread can be started then, either.
    """
    started: list[Thread] = []
    for _ in range(_THREADS):
        thread = make_thread(work, "zlaunch-checkpoint-file")
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started


def _cut(memory: Tensor) -> list[Tensor]:
    """Cut memory in chunks, each in separate huge pages, which direct transfers pin faster."""
    first = -memory.data_ptr() % CHUNK_BYTES
    return list(memory[first : first + _BUFFERS * CHUNK_BYTES].split(CHUNK_BYTES))  # type: ignore[no-untyped-call]


def _create(path: Path) -> tuple[int, bool]:
    """Create a file, unbuffered where the file system allows it. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The open that failed has created the file, which O_EXCL would refuse now.
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666), False


def _reserve(fd: int, nbytes: int) -> None:
    """Have the file system set the space aside, where it can: a full disk is known before anything is
    written.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        # Where the space cannot be reserved, a full disk is noticed by a write.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
