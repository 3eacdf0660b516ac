"""Keeps files that grow, and buffers of host memory for what is read from and written to them."""

from __future__ import annotations

from collections import deque
from threading import Condition

from torch import Tensor

from .disk import DiskTransfer, ScratchFile, aligned
from .scratch import ScratchFolder
from .transfer import HostLink


class Space:
    """Keeps a file that grows as pieces of it are allocated."""

    def __init__(self, folder: ScratchFolder, name: str) -> None:
        self.file = ScratchFile(folder.path / name)
        self.nbytes = 0

    def allocate(self, nbytes: int) -> int:
        """Reserve ``nbytes`` and return their offset. Raises DiskError when the disk is full."""
        offset = self.nbytes
        self.file.reserve(nbytes, offset)
        self.nbytes += aligned(nbytes)
        return offset


class BufferRing:
    """Lends at most ``count`` equal buffers of host memory; one that is being written to disk is lent again
    afterwards.
    """

    def __init__(self, link: HostLink, count: int) -> None:
        self._link, self._count = link, max(1, count)
        self.nbytes = 0
        self._free: list[Tensor] = []
        self._lent = 0
        self._writing: deque[tuple[Tensor, list[DiskTransfer]]] = deque()
        self._changed = Condition()

    def fit(self, nbytes: int) -> None:
        """Make later buffers at least this large."""
        if nbytes > self.nbytes:
            self.nbytes = nbytes
            for buffer in self._free:
                self._link.pool.give_back(buffer)
            self._free.clear()
            self._link.pool.trim()

    def take(self) -> Tensor:
        """Lend a uint8 buffer of ``nbytes``; wait for one that is being written. Raises that write's
        DiskError.
        """
        while True:
            with self._changed:
                if self._free:
                    self._lent += 1
                    return self._free.pop()
                if self._lent + len(self._writing) < self._count:
                    self._lent += 1
                    return self._link.pool.take(self.nbytes)
                if not self._writing:
                    self._changed.wait()
                    continue
                buffer, transfers = self._writing.popleft()
                self._lent += 1
            try:
                for transfer in transfers:
                    transfer.wait()
            except BaseException:
                self.give_back(buffer)
                raise
            return buffer

    def give_back(self, buffer: Tensor, *transfers: DiskTransfer) -> None:
        """Return a buffer that is free, or will be when these writes have ended."""
        with self._changed:
            self._lent -= 1
            if transfers:
                self._writing.append((buffer, list(transfers)))
            else:
                self._free.append(buffer)
            self._changed.notify()

    @property
    def spare(self) -> bool:
        """Tell whether ``take`` would not wait."""
        with self._changed:
            written = bool(self._writing) and all(transfer.done for transfer in self._writing[0][1])
            return written or bool(self._free) or self._lent + len(self._writing) < self._count

    def drain(self) -> None:
        """Wait for every write. Raises the first DiskError."""
        while True:
            with self._changed:
                if not self._writing:
                    return
                buffer, transfers = self._writing.popleft()
                self._lent += 1
            try:
                for transfer in transfers:
                    transfer.wait()
            finally:
                self.give_back(buffer)


class WriteBehind:
    """Keeps buffers whose content is being written to disk, a few at most, for all values on disk."""

    LIMIT = 4

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._pending: deque[tuple[DiskTransfer, Tensor]] = deque()

    def take(self, nbytes: int) -> Tensor:
        """Lend a uint8 buffer of at least ``nbytes``; wait for the oldest write if there are too many. Raises
        that write's DiskError.
        """
        while len(self._pending) >= self.LIMIT:
            transfer, buffer = self._pending.popleft()
            try:
                transfer.wait()
            finally:
                self._link.pool.give_back(buffer)
        return self._link.take(nbytes)

    def add(self, transfer: DiskTransfer, buffer: Tensor) -> None:
        """Keep ``buffer`` until the transfer has ended."""
        self._pending.append((transfer, buffer))
