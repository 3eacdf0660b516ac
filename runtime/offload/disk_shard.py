"""Optimizer state, gradients and parameters of one unit on disk, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.pending import DONE, Pending
from .disk import File, Transfer, aligned
from .host_gradient import Cuts, squares_of
from .manager import TILE_ALIGN, Offload


def tile_ranges(numel: int, tile_numel: int) -> list[tuple[int, int]]:
    """``[0, numel)`` in ranges of at most ``tile_numel`` elements, which start at multiples of TILE_ALIGN."""
    step = max(TILE_ALIGN, tile_numel // TILE_ALIGN * TILE_ALIGN)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def take_changed(master: Tensor, values: Tensor) -> None:
    """Overwrite the elements of ``master`` (flat) that do not round to ``values`` (any dtype, any device);
    the others keep their further digits.
    """
    values = values.to(master.device)
    master.copy_(torch.where(master.to(values.dtype) != values, values.to(master.dtype), master))


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type, unused-ignore]


@dataclass(frozen=True, slots=True)
class Record:
    """One tile on disk, all in the master dtype: ``[master | state 1 | ... | state n | gradient]``, each
    padded to whole pages. In memory a 16-bit copy of the new values follows.
    """

    start: int
    stop: int
    """Elements of the unit's shard."""
    offset: int
    """In the file, in bytes."""
    state_count: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def region_bytes(self) -> int:
        """Of the master values, of each state and of the gradient."""
        return aligned(self.numel * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Of what a step writes back."""
        return (1 + self.state_count) * self.region_bytes

    @property
    def file_bytes(self) -> int:
        return self.state_bytes + self.region_bytes

    @property
    def memory_bytes(self) -> int:
        return self.file_bytes + self.region_bytes

    def region(self, buffer: Tensor, index: int) -> Tensor:
        """0 the master values, 1 to n the states, n + 1 the gradient: a view of the buffer."""
        start = index * self.region_bytes
        return buffer[start : start + self.numel * self.dtype.itemsize].view(self.dtype)

    def gradient(self, buffer: Tensor) -> Tensor:
        return self.region(buffer, self.state_count + 1)

    def output(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for the new values in another dtype."""
        return buffer[self.file_bytes : self.file_bytes + self.numel * dtype.itemsize].view(dtype)


class DiskState:
    """The records of one unit, and the home of its gradient."""

    def __init__(self, offload: Offload, master: Tensor, cuts: Cuts) -> None:
        """Takes ``master`` (flat, on the device) as the first values and writes it. Raises DiskError."""
        assert offload.state_space is not None and offload.engine is not None
        self._offload, self._engine, self._cuts = offload, offload.engine, cuts
        self._file: File = offload.state_space.file
        self.records: list[Record] = []
        count = offload.options.state_count
        for start, stop in tile_ranges(master.numel(), offload.options.tile_numel):
            record = Record(start, stop, 0, count, master.dtype)
            offset = offload.state_space.allocate(record.file_bytes)
            self.records.append(Record(start, stop, offset, count, master.dtype))
            offload.ring.fit(record.memory_bytes)
        self._squares: list[Tensor] = []
        self.resident: Tensor | None = None
        """The gradient, where it stays on the device until the step; it is not on disk then."""
        self.delivered = False
        self.reader: Pending = DONE
        self.write_master(master)

    def read(self, record: Record, buffer: Tensor) -> Transfer:
        """Start to read a tile, with its gradient if that is on disk."""
        length = record.file_bytes if self.resident is None else record.state_bytes
        return self._engine.read(self._file, _bytes_of(buffer)[:length], record.offset)

    def write(self, record: Record, buffer: Tensor) -> Transfer:
        """Start to write a tile back, without the gradient."""
        return self._engine.write(self._file, _bytes_of(buffer)[: record.state_bytes], record.offset)

    def write_master(self, values: Tensor) -> None:
        """Replace the master values. Raises DiskError."""
        ring = self._offload.ring
        ring.drain()  # a step's own write of them may still be on its way
        for record in self.records:
            buffer = ring.take()
            record.region(buffer, 0).copy_(values[record.start : record.stop])
            write = self._engine.write(self._file, _bytes_of(buffer)[: record.region_bytes], record.offset)
            ring.give_back(buffer, write)
        ring.drain()

    def take_changes(self, values: Tensor) -> None:
        """Replace the master values that do not round to ``values`` (flat, any dtype). Raises DiskError."""
        ring = self._offload.ring
        ring.drain()
        for record in self.records:
            buffer = ring.take()
            writes: list[Transfer] = []
            try:
                view = _bytes_of(buffer)[: record.region_bytes]
                self._engine.read(self._file, view, record.offset).wait()
                take_changed(record.region(buffer, 0), values[record.start : record.stop])
                writes.append(self._engine.write(self._file, view, record.offset))
            finally:
                ring.give_back(buffer, *writes)
        ring.drain()

    def deliver(self, shard: Tensor, *, fresh: bool, stays: bool) -> None:
        self.reader.wait()
        self.reader = DONE
        self.delivered = True
        self.resident = shard if stays else None
        self._squares = squares_of(shard, self._cuts) if stays or fresh else []
        if stays:
            return
        if not fresh:
            self._offload.ring.drain()  # the sum so far may still be on its way
        for record in self.records:
            self._deliver_tile(record, shard[record.start : record.stop], fresh)

    def _deliver_tile(self, record: Record, part: Tensor, fresh: bool) -> None:
        ring, offset = self._offload.ring, record.offset + record.state_bytes
        buffer = ring.take()
        grad = record.gradient(buffer)
        view = _bytes_of(buffer)[record.state_bytes : record.file_bytes]
        arrival = DONE
        if fresh:
            arrival = self._down(part, grad)
        else:
            landed = record.region(buffer, 0)
            arriving = self._down(part, landed)
            self._engine.read(self._file, view, offset).wait()
            arriving.wait()
            grad.add_(landed)
            cuts = [
                (max(start, record.start) - record.start, min(stop, record.stop) - record.start)
                for start, stop in self._cuts
                if start < record.stop and stop > record.start
            ]
            self._squares += squares_of(grad, cuts)
        ring.give_back(buffer, self._engine.write(self._file, view, offset, after=arrival.wait))

    def _down(self, part: Tensor, target: Tensor) -> Pending:
        """Start to copy a part of a gradient to host memory, in the target's dtype."""
        return self._offload.link.download(part.to(target.dtype), target)

    def squares(self) -> list[Tensor]:
        return self._squares

    @property
    def grad(self) -> Tensor:
        if self.resident is None:
            raise RuntimeError(
                "this gradient is on disk (offload_optimizer nvme): single parameters' gradients cannot be "
                "reached; engine.zero_grad() drops all"
            )
        return self.resident

    def changed(self) -> None:
        self._squares = squares_of(self.grad, self._cuts)


class DiskValues:
    """A unit's shard of the parameters on disk, in the compute dtype."""

    def __init__(self, offload: Offload, values: Tensor) -> None:
        """Writes ``values`` (flat). Raises DiskError."""
        assert offload.value_space is not None and offload.engine is not None
        self._engine, self._link, self._behind = offload.engine, offload.link, offload.behind
        self._file = offload.value_space.file
        self.numel, self.dtype = values.numel(), values.dtype
        self._nbytes = aligned(self.numel * self.dtype.itemsize)
        self._offset = offload.value_space.allocate(self._nbytes)
        self._writes: list[Transfer] = []
        self.write(0, values)
        self.finish_writes()

    def start_read(self) -> Reading:
        """Start to read the shard into a buffer of the pool. Raises DiskError of an earlier write."""
        self.finish_writes()
        buffer = self._link.take(self._nbytes)
        transfer = self._engine.read(self._file, _bytes_of(buffer)[: self._nbytes], self._offset)
        return Reading(self, transfer, buffer)

    def write(self, start: int, values: Tensor) -> None:
        """Start to write elements from ``start`` on (a multiple of TILE_ALIGN); ``values`` may change at
        once. Raises DiskError of an earlier write.
        """
        nbytes = aligned(values.numel() * self.dtype.itemsize)
        buffer = self._behind.take(nbytes)
        buffer[: values.numel() * self.dtype.itemsize].view(self.dtype).copy_(values)
        offset = self._offset + start * self.dtype.itemsize
        transfer = self._engine.write(self._file, _bytes_of(buffer)[:nbytes], offset)
        self._behind.add(transfer, buffer)
        self._writes.append(transfer)

    def finish_writes(self) -> None:
        """Wait until everything is written. Raises DiskError."""
        for transfer in self._writes:
            transfer.wait()
        self._writes.clear()

    def release(self, buffer: Tensor) -> None:
        """Return a buffer that was read into; the device may still be copying from it."""
        self._link.give_back(buffer)


class Reading:
    """A shard on its way into memory."""

    def __init__(self, home: DiskValues, transfer: Transfer, buffer: Tensor) -> None:
        self._home, self._transfer, self._buffer = home, transfer, buffer

    def wait(self) -> Tensor:
        """The values, until :meth:`release`. Raises DiskError."""
        self._transfer.wait()
        home = self._home
        return self._buffer[: home.numel * home.dtype.itemsize].view(home.dtype)

    def release(self) -> None:
        """The values are no longer needed, copies of them to the device included."""
        self._home.release(self._buffer)


def cuts_of(pieces: Sequence[tuple[int, int]], numel: int, tile_numel: int) -> list[tuple[int, int]]:
    """Ranges of a shard cut at tile borders: what norms are made of, so that they are the same sums
    wherever the gradient rests.
    """
    cuts = []
    tiles = tile_ranges(numel, tile_numel)
    for start, stop in pieces:
        for low, high in tiles:
            if start < high and stop > low:
                cuts.append((max(start, low), min(stop, high)))
    return cuts
