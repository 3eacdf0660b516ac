"""Represents another rank of this machine: a connection, and the memory that may be read."""

from __future__ import annotations

import mmap
import socket

import torch
from torch import Tensor

from ..comm.peer_memory import Identity

_PAGE = mmap.PAGESIZE


class Chunk:
    """Maps one file, a part of an arena."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.memory = mmap.mmap(fd, nbytes)
        self.nbytes, self.used = nbytes, 0

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def forget(self, offset: int, nbytes: int) -> None:
        """Unmap another rank's pages from this process: they stay where they are, and no longer count as
        memory of this process too.
        """
        start, stop = offset // _PAGE * _PAGE, -(-(offset + nbytes) // _PAGE) * _PAGE
        self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Peer:
    """Represents the other end of one connection."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.chunks: dict[int, Chunk] = {}
        self.ready: dict[tuple[int, int], tuple[int, int, Identity]] = {}
        """Maps a collective (channel, sequence number) to where this peer's part is, chunk and offset, and to
        what it is about.
        """
        self.gone = False
