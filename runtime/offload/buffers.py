"""Lends buffers of host memory for what is on its way to or from a disk or a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition

from torch import Tensor

from .disk import DiskTransfer
from .transfer import HostLink


class BufferRing:
    """Lends at most ``count`` equal buffers of host memory; one that is being written to disk is lent again
    afterwards.
    """

    def __init__(self, link: HostLink, count: int) -> None:
        self._link, self._count = link, max(1, count)
        self.nbytes = 0
        self._free: list[Tensor] = []
        self._lent = 0
        self._writing: deque[tuple[Tensor, DiskTransfer]] = deque()
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
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._writing or self._lent < self._count)
            self._lent += 1
            if self._free:
                return self._free.pop()
            if self._lent + len(self._writing) <= self._count:
                return self._link.pool.take(self.nbytes)
            buffer, transfer = self._writing.popleft()
        try:
            transfer.wait()
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer

    def give_back(self, buffer: Tensor, transfer: DiskTransfer | None = None) -> None:
        """Return a buffer that is free, or will be when this transfer has ended."""
        with self._changed:
            self._lent -= 1
            if transfer is not None:
                self._writing.append((buffer, transfer))
            else:
                self._free.append(buffer)
            self._changed.notify()

    @property
    def spare(self) -> bool:
        """Tell whether ``take`` would not wait."""
        with self._changed:
            written = bool(self._writing) and self._writing[0][1].done
            return written or bool(self._free) or self._lent + len(self._writing) < self._count

    def drain(self) -> None:
        """Wait for every write. Raises the first DiskError."""
        while True:
            with self._changed:
                if not self._writing:
                    return
                buffer, transfer = self._writing.popleft()
                self._lent += 1
            try:
                transfer.wait()
            finally:
                self.give_back(buffer)


class BufferQueue:
    """Lends buffers of host memory of any size; of those that came back at most ``limit`` are still in use by
    a transfer.
    """

    def __init__(self, link: HostLink, limit: int) -> None:
        self._link, self._limit = link, limit
        self._busy: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def take(self, nbytes: int) -> Tensor:
        """Lend a uint8 buffer of at least ``nbytes``; wait for the oldest transfer if there are too many.
        Raises that transfer's DiskError.
        """
        self._retire(self._limit - 1)
        return self._link.take(nbytes)

    def give_back(self, buffer: Tensor, wait: Callable[[], None]) -> None:
        """Take a buffer back, to be lent again once ``wait``, which waits for its transfer, has returned."""
        self._busy.append((buffer, wait))

    def drain(self) -> None:
        """Wait until no transfer uses a buffer. Raises the first DiskError."""
        self._retire(0)

    def _retire(self, left: int) -> None:
        while len(self._busy) > left:
            buffer, wait = self._busy.popleft()
            try:
                wait()
            finally:
                self._link.pool.give_back(buffer)
