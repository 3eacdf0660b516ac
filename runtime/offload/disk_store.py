"""Keeps shards of units on disk: master values, optimizer state and gradients, tile by tile; and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.pending import DONE, Pending
from ..zero.layout import Range
from ..zero.store import Access, OpenTile, ShardReader, ShardStore, TileView, ValueStore, squares_of
from .buffers import BufferQueue, BufferRing
from .disk import DiskEngine, DiskTransfer, ScratchFile, aligned
from .transfer import HostLink


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type, unused-ignore]


@dataclass(frozen=True, slots=True)
class DiskTile:
    """Describes one tile on disk: ``[master | state 1 | ... | state n | gradient]``, all in the master dtype
    and each padded to whole pages. In memory a 16-bit copy of the new values follows.
    """

    start: int
    stop: int
    """Bound, with ``start``, the elements of the unit's shard."""
    offset: int
    """Counts bytes from the start of the file."""
    state_count: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def region_bytes(self) -> int:
        """Return the bytes of the master values, which each state and the gradient have, too."""
        return aligned(self.numel * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a step writes back."""
        return (1 + self.state_count) * self.region_bytes

    @property
    def file_bytes(self) -> int:
        return self.state_bytes + self.region_bytes

    @property
    def memory_bytes(self) -> int:
        return self.file_bytes + self.region_bytes

    def region(self, buffer: Tensor, index: int) -> Tensor:
        """Return a view of the buffer: 0 the master values, 1 to n the states, n + 1 the gradient."""
        start = index * self.region_bytes
        return buffer[start : start + self.numel * self.dtype.itemsize].view(self.dtype)

    def gradient(self, buffer: Tensor) -> Tensor:
        return self.region(buffer, self.state_count + 1)

    def output(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a view of the space for the new values in another dtype."""
        return buffer[self.file_bytes : self.file_bytes + self.numel * dtype.itemsize].view(dtype)


class DiskStore(ShardStore):
    """Keeps the tiles of one unit on disk, gradient included."""

    def __init__(
        self,
        master: Tensor,
        values: ValueStore,
        dtype: torch.dtype,
        cuts: Sequence[Range],
        tiles: Sequence[Range],
        *,
        state_room: int,
        engine: DiskEngine,
        file: ScratchFile,
        ring: BufferRing,
        link: HostLink,
    ) -> None:
        """Write ``master`` (flat, on the device) as the first values. ``dtype``: the compute dtype. Raises
        DiskError.
        """
        super().__init__(None, values, cuts, tiles)
        self.state_room = state_room
        self._numel, self._dtype = master.numel(), dtype
        self._engine, self._file, self._ring, self._link = engine, file, ring, link
        self._tiles: dict[Range, DiskTile] = {}
        for start, stop in tiles:
            tile = DiskTile(start, stop, 0, state_room, master.dtype)
            self._tiles[start, stop] = replace(tile, offset=file.reserve(tile.file_bytes))
            ring.fit(tile.memory_bytes)
        self._squares: list[Tensor] = []
        self._resident: Tensor | None = None
        """Holds the gradient, where it stays on the device until the step; it is not on disk then."""
        for tile in self._tiles.values():
            opened = self._open(tile, Access.REPLACE)
            opened.wait().master.copy_(master[tile.start : tile.stop])
            opened.close()
        ring.drain()

    # -- tiles

    @property
    def has_room(self) -> bool:
        """Tell whether a buffer is free."""
        return self._ring.spare

    def open(self, tile: Range, access: Access) -> OpenTile:
        """Start to read a tile into a buffer of the ring."""
        return self._open(self._tiles[tile], access)

    def _open(self, tile: DiskTile, access: Access) -> _TileInBuffer:
        with_grad = access is Access.STEP and self._resident is None
        nbytes = {
            Access.REPLACE: 0,
            Access.MASTER: tile.region_bytes,
            Access.STEP: tile.file_bytes if with_grad else tile.state_bytes,
        }.get(access, tile.state_bytes)
        buffer = self._ring.take()
        try:
            read = self._engine.read(self._file, _bytes_of(buffer)[:nbytes], tile.offset) if nbytes else None
        except BaseException:
            self._ring.give_back(buffer)
            raise
        return _TileInBuffer(self, tile, access, buffer, read)

    def _view(self, tile: DiskTile, access: Access, buffer: Tensor) -> TileView:
        state = [tile.region(buffer, 1 + index) for index in range(tile.state_count)]
        view = TileView(tile.start, tile.stop, tile.region(buffer, 0), state=state)
        if access is Access.STEP:
            view.grad = tile.gradient(buffer)
            if self._resident is not None:
                view.grad.copy_(self._resident[tile.start : tile.stop])
            if self._dtype != tile.dtype:
                view.out = tile.output(buffer, self._dtype)
        return view

    def _write(self, tile: DiskTile, access: Access, buffer: Tensor) -> None:
        """Start to write a tile back, without the gradient, and return its buffer to the ring."""
        if access is Access.READ:
            self._ring.give_back(buffer)
            return
        only_master = access in (Access.REPLACE, Access.MASTER)
        nbytes = tile.region_bytes if only_master else tile.state_bytes
        self._ring.give_back(buffer, self._engine.write(self._file, _bytes_of(buffer)[:nbytes], tile.offset))

    def drain(self) -> None:
        """Wait for every write."""
        self._ring.drain()

    # -- gradient

    def room_for_grad(self, first: bool, dtype: torch.dtype, rest: torch.dtype) -> Tensor:
        """Return memory on the device."""
        return torch.empty(self._numel, dtype=dtype, device=self._link.device)

    def add_grad(self, shard: Tensor, *, first: bool, stays: bool) -> None:
        """Start to write a gradient, or its sum with the former ones; keep one that ``stays``."""
        self.reader.wait()
        self.reader = DONE
        self.has_grad = True
        self._resident = shard if stays else None
        whole = stays or first
        self._squares = squares_of([shard[start:stop] for start, stop in self.cuts]) if whole else []
        if stays:
            return
        if not first:
            self._ring.drain()  # the sum so far may still be on its way
        for tile in self._tiles.values():
            self._add_to_tile(tile, shard[tile.start : tile.stop], first)

    def _add_to_tile(self, tile: DiskTile, part: Tensor, first: bool) -> None:
        offset = tile.offset + tile.state_bytes
        buffer = self._ring.take()
        grad = tile.gradient(buffer)
        view = _bytes_of(buffer)[tile.state_bytes : tile.file_bytes]
        arrival = DONE
        if first:
            arrival = self._link.download(part.to(grad.dtype), grad)
        else:
            landed = tile.region(buffer, 0)
            arriving = self._link.download(part.to(landed.dtype), landed)
            self._engine.read(self._file, view, offset).wait()
            arriving.wait()
            grad.add_(landed)
            self._squares += squares_of(
                [
                    grad[max(start, tile.start) - tile.start : min(stop, tile.stop) - tile.start]
                    for start, stop in self.cuts
                    if start < tile.stop and stop > tile.start
                ]
            )
        self._ring.give_back(buffer, self._engine.write(self._file, view, offset, after=arrival.wait))

    def grad_squares(self) -> list[Tensor]:
        """Return the sums that were computed when the gradient came."""
        return self._squares

    def grad(self) -> Tensor:
        """Return the gradient, where it is on the device. Raises RuntimeError where it is on disk."""
        if self._resident is None:
            raise RuntimeError(
                "this gradient is on NVMe (offload_optimizer), where single gradients are not accessible; "
                "engine.zero_grad() drops all of them"
            )
        return self._resident

    def grad_changed(self) -> None:
        """Sum the squares again."""
        self._squares = super().grad_squares()


class _TileInBuffer(OpenTile):
    """Represents a tile on its way into a buffer, in it, or on its way back."""

    def __init__(
        self, store: DiskStore, tile: DiskTile, access: Access, buffer: Tensor, read: DiskTransfer | None
    ) -> None:
        self._values, self._store, self._tile, self._access = store.values, store, tile, access
        self._buffer, self._read = buffer, read
        self._shown: TileView | None = None
        self._sent: Pending = DONE

    def wait(self) -> TileView:
        if self._shown is None:
            if self._read is not None:
                self._read.wait()
            self._shown = self._store._view(self._tile, self._access, self._buffer)
        return self._shown

    def publish(self, after: torch.cuda.Event | None = None) -> Pending:
        self._sent = super().publish(after)
        return self._sent

    def close(self) -> None:
        self._sent.synchronize()
        self._store._write(self._tile, self._access, self._buffer)

    def abandon(self) -> None:
        arriving = self._read if self._read is not None and not self._read.done else None
        self._store._ring.give_back(self._buffer, arriving)


class DiskValues(ValueStore):
    """Keeps a unit's shard of the values on disk, in the compute dtype."""

    blocks_ahead = 2
    is_gathered_directly = False

    def __init__(
        self, values: Tensor, *, engine: DiskEngine, file: ScratchFile, behind: BufferQueue, link: HostLink
    ) -> None:
        """Write ``values`` (flat, in the compute dtype). Raises DiskError."""
        super().__init__(None)
        self._engine, self._file, self._behind, self._link = engine, file, behind, link
        self._numel, self._dtype = values.numel(), values.dtype
        self._nbytes = aligned(self._numel * self._dtype.itemsize)
        self._offset = file.reserve(self._nbytes)
        self._writes: list[DiskTransfer] = []
        self.write(0, values)
        self.flush()

    def start_gather(self, unit: ShardReader) -> Pending:
        """Read ahead; the collective starts at the first wait, in the blocks' order."""
        reading = self._start_read()

        def gather() -> None:
            pending = unit.gather_from(reading.values())
            reading.release()
            pending.wait()

        return reading.then(gather)

    def _start_read(self) -> _Reading:
        self.flush()
        buffer = self._link.take(self._nbytes)
        transfer = self._engine.read(self._file, _bytes_of(buffer)[: self._nbytes], self._offset)
        return _Reading(transfer, buffer, self._numel, self._dtype, self._link)

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        """Yield the values in a buffer."""
        reading = self._start_read()
        try:
            reading.wait()
            yield reading.values()
        finally:
            reading.release()

    def write(self, start: int, values: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        """Start to write elements from ``start`` on (a multiple of TILE_ALIGN); ``values`` may change at
        once.
        """
        nbytes = aligned(values.numel() * self._dtype.itemsize)
        buffer = self._behind.take(nbytes)
        buffer[: values.numel() * self._dtype.itemsize].view(self._dtype).copy_(values)
        offset = self._offset + start * self._dtype.itemsize
        transfer = self._engine.write(self._file, _bytes_of(buffer)[:nbytes], offset)
        self._behind.give_back(buffer, transfer.wait)
        self._writes.append(transfer)
        return DONE

    def flush(self) -> None:
        """Wait until everything is written."""
        for transfer in self._writes:
            transfer.wait()
        self._writes.clear()


class _Reading(Pending):
    """Represents a shard on its way into a buffer."""

    def __init__(
        self, transfer: DiskTransfer, buffer: Tensor, numel: int, dtype: torch.dtype, link: HostLink
    ) -> None:
        self._transfer, self._buffer, self._numel, self._dtype = transfer, buffer, numel, dtype
        self._link = link

    def wait(self) -> None:
        self._transfer.wait()

    def values(self) -> Tensor:
        """Return the values, which stay until :meth:`release`."""
        return self._buffer[: self._numel * self._dtype.itemsize].view(self._dtype)

    def release(self) -> None:
        """Return the buffer to the pool; the device may still be copying from it."""
        self._link.give_back(self._buffer)
