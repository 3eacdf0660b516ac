"""A copy in host memory of what a save still has to write, so that training can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...cuda_ops.pinned import PAGE_BYTES, PinnedPool

_SEGMENT_BYTES = 256 << 20


class Snapshot:
    """Flat tensors by name. The memory, page-locked where there is a GPU, is kept for the next snapshot."""

    def __init__(self) -> None:
        self._pool = PinnedPool(pin=True)
        self._segments: list[Tensor] = []
        self._current, self._filled = 0, 0
        self._segment_bytes = _SEGMENT_BYTES
        self._tensors: dict[tuple[str, str], list[Tensor]] = {}
        self._cuda = False

    @property
    def held_bytes(self) -> int:
        """Memory that it holds."""
        return self._pool.statistics().held_bytes

    def reserve(self, nbytes: int) -> None:
        """Take the memory for so many bytes beforehand; the system makes new memory much slower than it
        copies.
        """
        self.begin(nbytes)
        while sum(segment.numel() for segment in self._segments) < nbytes + PAGE_BYTES:
            self._segments.append(self._pool.take(self._segment_bytes))
            self._segments[-1].zero_()

    def begin(self, nbytes: int) -> None:
        """Forget the former content; its memory is used again. About ``nbytes`` will come."""
        self._segment_bytes = min(_SEGMENT_BYTES, nbytes + PAGE_BYTES)
        self._tensors.clear()
        self._current = self._filled = 0

    def take(self, prefix: str, pieces: Mapping[str, Sequence[Tensor]]) -> None:
        """Start to copy tensors, each given as consecutive pieces on any device."""
        for kind, parts in pieces.items():
            copies = self._tensors.setdefault((prefix, kind), [])
            for part in parts:
                copies += self._copy(part.detach())

    def _copy(self, part: Tensor) -> list[Tensor]:
        self._cuda = self._cuda or part.is_cuda
        copies = []
        at = 0
        while at < part.numel():
            room = self._room()
            count = min(part.numel() - at, room.numel() // part.dtype.itemsize)
            copy = room[: count * part.dtype.itemsize].view(part.dtype)
            copy.copy_(part[at : at + count], non_blocking=True)
            copies.append(copy)
            self._filled += -(-count * part.dtype.itemsize // 64) * 64
            at += count
        return copies

    def _room(self) -> Tensor:
        """What is left of the present segment."""
        if self._segments and self._filled + PAGE_BYTES > self._segments[self._current].numel():
            self._current, self._filled = self._current + 1, 0
        if self._current == len(self._segments):
            self._segments.append(self._pool.take(self._segment_bytes))
        return self._segments[self._current][self._filled :]

    def settle(self) -> None:
        """Return when everything has been copied."""
        if self._cuda:
            torch.cuda.current_stream().synchronize()

    def parts(self, prefix: str, kind: str) -> Sequence[Tensor]:
        """A tensor's consecutive pieces."""
        return self._tensors[prefix, kind]

    def close(self) -> None:
        """Give the memory back."""
        self._tensors.clear()
        self._segments.clear()
        self._pool.close()
