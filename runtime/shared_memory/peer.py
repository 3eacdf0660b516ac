"""What a rank knows of another rank of its machine: a connection, and the memory that it may read."""

from __future__ import annotations

import mmap
import socket

import torch
from torch import Tensor

from ..comm.peer_memory import Identity

_PAGE = mmap.PAGESIZE


class Chunk:
    """A part of an arena: one mapping of one file."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.memory = mmap.mmap(fd, nbytes)
        self.nbytes, self.used = nbytes, 0

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def forget(self, offset: int, nbytes: int) -> None:
        """Take pages of another rank's out of this process: they stay where they are, and no longer count as
        memory of this process too.
        """
        start, stop = offset // _PAGE * _PAGE, -(-(offset + nbytes) // _PAGE) * _PAGE
        self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Peer:
    """The other end of one connection."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.chunks: dict[int, Chunk] = {}
        self.ready: dict[tuple[int, int], tuple[int, int]] = {}
        """Where this peer's part of a collective (channel, sequence number) is: chunk and offset."""
        self.identity: dict[tuple[int, int], Identity] = {}
        """What this peer's part of a collective that is under way here is about."""
        self.gone = False
