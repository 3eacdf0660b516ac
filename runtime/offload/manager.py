"""Where state and parameters rest, and what that takes: one object an engine."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from threading import Condition

import torch
from torch import Tensor

from ..comm.collectives import Comm
from .disk import DiskEngine, File, Transfer, aligned
from .scratch import ScratchFolder
from .transfer import HostLink

TILE_NUMEL = 4 << 20
"""Elements of a shard that are moved and updated together, unless sub_group_size is less: long transfers run
at a disk's full speed, and a few of them in memory cost little.
"""
TILE_ALIGN = 4096
"""Tiles start at multiples of this many elements, whole pages in every dtype."""


class Place(Enum):
    """Where something rests between its uses."""

    DEVICE = "none"
    HOST = "cpu"
    DISK = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """What the config says about offload; sizes in elements of a rank's own shards."""

    optimizer: Place = Place.DEVICE
    parameters: Place = Place.DEVICE
    optimizer_path: str | None = None
    parameters_path: str | None = None
    pin: bool = True
    pinned_budget_bytes: int | None = None
    ratio: float = 1.0
    """Share of the optimizer state that leaves the device; the rest stays, the last units first."""
    max_in_cpu_numel: int = 0
    """With parameters on disk: this many stay in host memory."""
    buffer_count: int = 4
    """Tiles in memory at once while they are updated."""
    tile_numel: int = TILE_NUMEL
    block_bytes: int = 1 << 20
    threads: int = 4
    state_count: int = 2
    """Tensors the optimizer keeps for each element."""

    @property
    def any(self) -> bool:
        """Whether anything leaves the device."""
        return self.optimizer is not Place.DEVICE or self.parameters is not Place.DEVICE

    @property
    def disk(self) -> bool:
        """Whether anything rests on disk."""
        return Place.DISK in (self.optimizer, self.parameters)


def _give_freed_memory_back() -> None:
    """Tell glibc to map every large block by itself, so that freeing it returns its memory to the system.

    By default its threshold grows with the blocks that are freed, and a model whose parameters come and go
    leaves several times its size behind. Elsewhere than under glibc this does nothing.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    except (OSError, AttributeError):
        return


_M_MMAP_THRESHOLD = -3


class Space:
    """A file that grows as pieces of it are given out."""

    def __init__(self, folder: ScratchFolder, name: str) -> None:
        self.file = File(folder.path / name)
        self.nbytes = 0

    def allocate(self, nbytes: int) -> int:
        """Set ``nbytes`` aside and return their offset. Raises DiskError when the disk is full."""
        offset = self.nbytes
        self.file.reserve(nbytes, offset)
        self.nbytes += aligned(nbytes)
        return offset


class BufferRing:
    """At most ``count`` equal buffers of host memory; one that is being written to disk is lent again
    afterwards.
    """

    def __init__(self, link: HostLink, count: int) -> None:
        self._link, self._count = link, max(1, count)
        self.nbytes = 0
        self._free: list[Tensor] = []
        self._lent = 0
        self._writing: deque[tuple[Tensor, list[Transfer]]] = deque()
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
        """A uint8 buffer of ``nbytes``; waits for one that is being written. Raises that write's
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

    def give_back(self, buffer: Tensor, *transfers: Transfer) -> None:
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
        """Whether ``take`` would not wait."""
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
    """Buffers whose content is being written to disk, a few at most, whoever wrote them."""

    LIMIT = 4

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._pending: deque[tuple[Transfer, Tensor]] = deque()

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of at least ``nbytes``; waits for the oldest write if there are too many. Raises
        that write's DiskError.
        """
        while len(self._pending) >= self.LIMIT:
            transfer, buffer = self._pending.popleft()
            try:
                transfer.wait()
            finally:
                self._link.pool.give_back(buffer)
        return self._link.take(nbytes)

    def add(self, transfer: Transfer, buffer: Tensor) -> None:
        """Keep ``buffer`` until the transfer has ended."""
        self._pending.append((transfer, buffer))


class Offload:
    """Decides where each unit's state and parameters rest, and owns what they rest in.

    Raises DiskError where ``nvme_path`` cannot be used.
    """

    def __init__(self, options: OffloadOptions, comm: Comm) -> None:
        self.options, self.comm = options, comm
        self.link = HostLink(comm.device, pin=options.pin, budget_bytes=options.pinned_budget_bytes)
        self.folders: list[ScratchFolder] = []
        self.engine: DiskEngine | None = None
        self.state_space: Space | None = None
        self.value_space: Space | None = None
        self.ring = BufferRing(self.link, options.buffer_count)
        self.behind = WriteBehind(self.link)
        if options.parameters is not Place.DEVICE:
            _give_freed_memory_back()
        if options.disk:
            self.engine = DiskEngine(block_bytes=options.block_bytes, threads=options.threads)
        if options.optimizer is Place.DISK:
            self.state_space = self._space(options.optimizer_path, "optimizer.bin")
        if options.parameters is Place.DISK:
            self.value_space = self._space(options.parameters_path, "parameters.bin")
        self._values_in_host = 0

    def _space(self, path: str | None, name: str) -> Space:
        assert path is not None
        folder = next((f for f in self.folders if f.root.absolute() == Path(path).absolute()), None)
        if folder is None:
            folder = ScratchFolder(path, self.comm.rank)
            self.folders.append(folder)
        return Space(folder, name)

    def place_values(self, numel: int) -> Place:
        """Where a further ``numel`` elements of sharded parameters rest."""
        if self.options.parameters is not Place.DISK:
            return self.options.parameters
        if self._values_in_host + numel <= self.options.max_in_cpu_numel:
            self._values_in_host += numel
            return Place.HOST
        return Place.DISK

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Flat host memory that stays, also a source of gathers."""
        if self.comm.shared:
            return self.comm.empty(numel, dtype)
        return self.link.empty(numel, dtype)

    def close(self) -> None:
        """End the disk's threads and remove the folders."""
        if self.engine is not None:
            self.engine.close()
        self.link.close()
        for space in (self.state_space, self.value_space):
            if space is not None:
                space.file.close()
        for folder in self.folders:
            folder.remove()
