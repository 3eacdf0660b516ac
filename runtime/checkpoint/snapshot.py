"""Copies to host memory what a save still has to write, so that training can go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from ...cuda_ops.pinned import PAGE_BYTES
from ..comm.pending import DONE, Pending
from ..offload.transfer import HostLink

_SEGMENT_BYTES = 256 << 20


class Snapshot:
    """Holds flat tensors by name. The memory, page-locked where there is a GPU, is kept for the next
    snapshot.

    Tensors on a GPU are copied on a separate stream: the host waits for it only in :meth:`arrived`.
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._segments: list[Tensor] = []
        self._current, self._filled = 0, 0
        self._segment_bytes = _SEGMENT_BYTES
        self._tensors: dict[str, dict[str, list[Tensor]]] = {}
        self._last: Pending = DONE
        """The copy that was started last; copies end in their order."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that the snapshot holds."""
        return sum(segment.numel() for segment in self._segments)

    def reserve(self, nbytes: int) -> None:
        """Take the memory for so many bytes beforehand; the system makes new memory much slower than it
        copies.
        """
        self.begin(nbytes)
        while self.held_bytes < nbytes + PAGE_BYTES:
            self._add_segment()
            self._segments[-1].zero_()

    def begin(self, nbytes: int) -> None:
        """Forget the former content and use its memory again. About ``nbytes`` will come."""
        self._segment_bytes = min(_SEGMENT_BYTES, nbytes + PAGE_BYTES)
        self._tensors.clear()
        self._current = self._filled = 0

    def take(self, prefix: str, pieces: Mapping[str, Sequence[Tensor]]) -> None:
        """Start to copy tensors, each given as consecutive pieces on any device."""
        self._tensors[prefix] = {
            kind: [copy for part in parts for copy in self._copy(part.detach())]
            for kind, parts in pieces.items()
        }

    def _copy(self, part: Tensor) -> list[Tensor]:
        copies = []
        at = 0
        while at < part.numel():
            room = self._room()
            count = min(part.numel() - at, room.numel() // part.dtype.itemsize)
            copy = room[: count * part.dtype.itemsize].view(part.dtype)
            source = part[at : at + count]
            if source.is_cuda:
                self._last = self._link.download(source, copy)
            else:
                copy.copy_(source)
            copies.append(copy)
            self._filled += -(-count * part.dtype.itemsize // 64) * 64
            at += count
        return copies

    def _room(self) -> Tensor:
        """Return what is left of the present segment."""
        if self._segments and self._filled + PAGE_BYTES > self._segments[self._current].numel():
            self._current, self._filled = self._current + 1, 0
        if self._current == len(self._segments):
            self._add_segment()
        return self._segments[self._current][self._filled :]

    def _add_segment(self) -> None:
        self._segments.append(self._link.pool.take(self._segment_bytes))

    def arrived(self) -> None:
        """Return when everything has been copied."""
        self._last.wait()
        self._last = DONE

    @contextmanager
    def open(self, prefix: str) -> Iterator[Mapping[str, Sequence[Tensor]]]:
        """Give what was taken under this name, once it has arrived."""
        self.arrived()
        yield self._tensors[prefix]

    def close(self) -> None:
        """Give the memory back, once all copies have arrived."""
        self.arrived()
        self._tensors.clear()
        for segment in self._segments:
            self._link.pool.drop(segment)
        self._segments.clear()
