"""Keeps shards of units in host memory or on disk: values, masters, gradients and optimizer state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Condition
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.pending import DONE, Pending
from ..zero.layout import TILE_NUMEL, Range, tile_ranges
from ..zero.store import Access, OpenTile, ShardStore, TileView, ValueStore, squares_of
from .disk import DiskEngine, DiskTransfer, ScratchFile, aligned
from .transfer import HostLink

if TYPE_CHECKING:
    from ..zero.unit import Unit

# -- buffers ----------------------------------------------------------------------------------------
#
# Lends buffers of host memory for what is on its way to or from a disk or a device.


class BufferRing:
    """Lends at most ``count`` equal buffers of host memory; one that is being written to disk is lent again
    afterwards.
    """

    def __init__(self, link: HostLink, count: int) -> None:
        self._link = link
        self._count = max(1, count)
        self.nbytes = 0
        self._free: list[Tensor] = []
        self._lent = 0
        self._writing: deque[tuple[Tensor, DiskTransfer]] = deque()
        self._changed = Condition()

    def fit(self, nbytes: int) -> None:
        """Make later buffers at least this large."""
        if nbytes > self.nbytes:
            self.nbytes = nbytes
            # Smaller buffers would be lent again otherwise.
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
            # Counted as lent under the lock, waited for without it: another thread can return a buffer
            # meanwhile.
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
            # The oldest write alone: take() waits for that one.
            written = bool(self._writing) and self._writing[0][1].done
            return written or bool(self._free) or self._lent + len(self._writing) < self._count

    def drain(self) -> None:
        """Wait for every write. Raises the first DiskError."""
        while True:
            with self._changed:
                if not self._writing:
                    return
                buffer, transfer = self._writing.popleft()
                # give_back() below counts it down again.
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
        self._link = link
        self._limit = limit
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


# -- host store -------------------------------------------------------------------------------------


class HostValues(ValueStore):
    """Keeps a unit's shard in host memory, in the compute dtype."""

    def __init__(self, link: HostLink, tensor: Tensor) -> None:
        """Keep ``tensor``, which has the first values."""
        super().__init__(tensor)
        self._link = link
        self.is_gathered_directly = not link.cuda
        self._sent: Pending = DONE
        """Represents new values on their way from the device."""

    def start_gather(self, unit: Unit) -> Pending:
        """Copy the shard to the device, then gather."""
        if self.is_gathered_directly or self.tensor is None:
            return super().start_gather(unit)
        own = unit.own_part()
        # After two things: the memory of `own` may still be read by what the compute stream has queued, and
        # the new values may still be on their way to the host.
        upload = self._link.upload(self.tensor, own, self._link.mark(), self._sent.event)
        with self._link.behind_uploads():
            # The collective is started here, on the uploads' stream: it follows the copy, and the host waits
            # for neither.
            return upload.then(unit.gather_from(own).wait)

    def write(self, start: int, values: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        """Replace elements; what comes from the device arrives later (:meth:`flush`)."""
        assert self.tensor is not None
        target = self.tensor[start : start + values.numel()]
        if values.device.type != target.device.type:
            self._sent = self._link.download(values.to(target.dtype), target)
        elif target.data_ptr() != values.data_ptr():
            # Values on their way from the device would overwrite these later.
            self.flush()
            target.copy_(values)
        return DONE

    def flush(self) -> None:
        """Wait for values on their way from the device."""
        self._sent.wait()
        self._sent = DONE

    def release(self) -> None:
        """Release the memory."""
        if self.tensor is not None:
            self._link.release(self.tensor)
            self.tensor = None


class HostStore(ShardStore):
    """Keeps master values and gradient of a unit in host memory; the optimizer has the state there, too.

    The first micro-batch's gradient stays in the dtype it was reduced in; from the second on, the sum is kept
    in the dtype that the reducer says, normally fp32. Sums are made on the device, to which the former sum is
    copied: copies run beside the backward pass, and the host waits for none of them.
    """

    def __init__(
        self,
        link: HostLink,
        buffers: BufferQueue,
        master: Tensor,
        values: ValueStore,
        dtype: torch.dtype,
        cuts: Sequence[Range],
        tiles: Sequence[Range],
    ) -> None:
        """Keep ``master`` (flat, in host memory). ``dtype``: the compute dtype of the model."""
        super().__init__(master, values, cuts, tiles)
        self._link = link
        self._buffers = buffers
        self._dtype = dtype
        self._landing: Tensor | None = None
        """Keeps memory for a first gradient."""
        self._sum: Tensor | None = None
        """Keeps memory for a sum."""
        self._home: Tensor | None = None
        """Holds the gradient, once it has arrived: one of the two."""
        self._arrival: Pending = DONE
        self._source: Tensor | None = None
        self._squares: list[Tensor] | None = None
        self._accumulation_dtype = torch.float32

    # -- tiles

    def open(self, tile: Range, access: Access) -> OpenTile:
        """Show a part of the shard; for a step with space for new values in another dtype."""
        assert self.master is not None
        start, stop = tile
        view = TileView(start, stop, self.master[start:stop])
        if access is not Access.STEP:
            return OpenTile(self.values, view)
        view.grad = self.grad()[start:stop]
        if self._dtype == self.master.dtype:
            return OpenTile(self.values, view)
        target = self.values.tensor
        if target is not None and target.device.type == "cpu":
            view.out = target[start:stop]
            return OpenTile(self.values, view)
        nbytes = (stop - start) * self._dtype.itemsize
        buffer = self._buffers.take(nbytes)
        view.out = buffer[:nbytes].view(self._dtype)
        return _BufferedTile(self.values, view, self._buffers, buffer)

    def drain(self) -> None:
        """Wait for uploads."""
        self._buffers.drain()

    # -- gradient

    def room_for_grad(self, first: bool, dtype: torch.dtype, accumulation_dtype: torch.dtype) -> Tensor:
        """Return memory on the device."""
        assert self.master is not None
        self._accumulation_dtype = accumulation_dtype
        return torch.empty(self.master.numel(), dtype=dtype, device=self._link.device)

    def add_grad(self, shard: Tensor, *, first: bool, stays: bool) -> None:
        """Start to copy a gradient, or its sum with the former ones, to the host."""
        # A step in the background may still read the former gradient.
        self.reader.wait()
        self.reader = DONE
        if first:
            if self._landing is None or self._landing.dtype != shard.dtype:
                self._landing = self._link.empty(shard.numel(), shard.dtype)
            total = shard
            self._home = self._landing
        else:
            total = self._added(shard)
            if self._sum is None:
                self._sum = self._link.empty(total.numel(), total.dtype)
            self._home = self._sum
        self._squares = squares_of([total[start:stop] for start, stop in self.cuts])
        # Kept until the copy has arrived.
        self._source = total
        self._arrival = self._link.download(total, self._home)
        self.has_grad = True

    def before_gradient(self) -> None:
        """Let the device write where the last gradient was. One that no step has read (of a skipped step, of
        a unit that no pass has used) may still be on its way from there.
        """
        if self._arrival is not DONE:
            self._link.after_downloads()

    def _added(self, shard: Tensor) -> Tensor:
        """Copy the sum so far to the device, and add a gradient."""
        assert self._home is not None
        there = torch.empty_like(self._home, device=shard.device)
        # The former sum may still be on its way to the host, from which this copies it back.
        self._link.upload(self._home, there, self._link.mark(), self._arrival.event).wait()
        return there.to(self._accumulation_dtype).add_(shard)

    def grad(self) -> Tensor:
        """Return the gradient, once it has arrived: fp32, or the dtype it was reduced in."""
        self._arrival.wait()
        self._arrival = DONE
        self._source = None
        assert self._home is not None
        return self._home

    def grad_squares(self) -> list[Tensor]:
        """Return the sums computed on the device; compute them again if the gradient was changed since."""
        return super().grad_squares() if self._squares is None else self._squares

    def grad_changed(self) -> None:
        """Drop the sums of squares, which are of the former gradient."""
        self._squares = None


class _BufferedTile(OpenTile):
    """Shows a tile whose new values go to the device, or to a disk, from a separate buffer."""

    def __init__(self, values: ValueStore, view: TileView, buffers: BufferQueue, buffer: Tensor) -> None:
        super().__init__(values, view)
        self._buffers = buffers
        self._buffer = buffer
        self._sent = DONE

    def publish(self, after: torch.cuda.Event | None = None) -> Pending:
        self._sent = super().publish(after)
        return self._sent

    def close(self) -> None:
        # The upload reads from the buffer: it is lent again only after that.
        self._buffers.give_back(self._buffer, self._sent.synchronize)

    def abandon(self) -> None:
        self.close()


# -- disk store -------------------------------------------------------------------------------------
#
# Keeps shards of units on disk: master values, optimizer state and gradients, tile by tile; and values.


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
        self._numel = master.numel()
        self._dtype = dtype
        self._engine = engine
        self._file = file
        self._ring = ring
        self._link = link
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
            # Otherwise the ring would have one buffer less for ever, and in the end wait for itself.
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
        # State that was not read must not be written: the buffer has other data in its place.
        only_master = access in (Access.REPLACE, Access.MASTER)
        nbytes = tile.region_bytes if only_master else tile.state_bytes
        self._ring.give_back(buffer, self._engine.write(self._file, _bytes_of(buffer)[:nbytes], tile.offset))

    def drain(self) -> None:
        """Wait for every write."""
        self._ring.drain()

    # -- gradient

    def room_for_grad(self, first: bool, dtype: torch.dtype, accumulation_dtype: torch.dtype) -> Tensor:
        """Return memory on the device."""
        return torch.empty(self._numel, dtype=dtype, device=self._link.device)

    def add_grad(self, shard: Tensor, *, first: bool, stays: bool) -> None:
        """Start to write a gradient, or its sum with the former ones; keep one that ``stays``."""
        # As in HostStore: a step in the background may still read the former gradient.
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
            # Only the gradient is read here, so the region of the master values is free.
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
        # The disk's thread waits for the copy from the device; the backward pass continues.
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
        self._values = store.values
        self._store = store
        self._tile = tile
        self._access = access
        self._buffer = buffer
        self._read = read
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
        # The upload of the new values reads from this buffer.
        self._sent.synchronize()
        self._store._write(self._tile, self._access, self._buffer)

    def abandon(self) -> None:
        arriving = self._read if self._read is not None and not self._read.done else None
        # A read under way still fills the buffer: the ring waits for it before it lends the buffer again.
        self._store._ring.give_back(self._buffer, arriving)


class DiskValues(ValueStore):
    """Keeps a unit's shard of the values on disk, in the compute dtype.

    Note [Upload beside compute]. A read is started two blocks ahead. The host waits for it when the unit is
    used, after it has queued the compute of the block in front. The upload and the gather must not wait for
    that compute: they run on the uploads' stream, after what the compute stream had queued when the memory
    was allocated. That is done just before the block in front is queued: done with the read, it would take
    the memory of one block more.
    """

    blocks_ahead = 2
    is_gathered_directly = False

    def __init__(
        self, values: Tensor, *, engine: DiskEngine, file: ScratchFile, behind: BufferQueue, link: HostLink
    ) -> None:
        """Write ``values`` (flat, in the compute dtype). Raises DiskError."""
        super().__init__(None)
        self._engine = engine
        self._file = file
        self._behind = behind
        self._link = link
        self._numel = values.numel()
        self._dtype = values.dtype
        self._nbytes = aligned(self._numel * self._dtype.itemsize)
        self._offset = file.reserve(self._nbytes)
        self._writes: list[DiskTransfer] = []
        self._has_room = False
        self._room: torch.cuda.Event | None = None
        """Marks the compute stream where the memory of the gather under way was allocated."""
        self.write(0, values)
        self.flush()

    def start_gather(self, unit: Unit) -> Pending:
        """Read ahead; the collective starts at the first wait, in the blocks' order."""
        reading = self._start_read()
        self._has_room = False

        def gather() -> None:
            # At the first wait, not when the read ends: reads of several units end in another order on each
            # rank, and collectives need one order.
            if not self._has_room:
                self.make_room(unit)
            own = unit.own_part()
            upload = self._link.upload(reading.values(), own, self._room)
            with self._link.behind_uploads():
                pending = upload.then(unit.gather_from(own).wait)
                reading.release()
            pending.wait()

        return reading.then(gather)

    def make_room(self, unit: Unit) -> None:
        """Allocate the unit's memory, and mark what the device has queued so far and may still read in it."""
        if not self._has_room:
            unit.own_part()
            self._room = self._link.mark()
            self._has_room = True

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
        itemsize = self._dtype.itemsize
        # The first values, and loaded ones, are a whole shard: one copy would need as much memory again.
        for low, high in tile_ranges(values.numel(), TILE_NUMEL):
            nbytes = aligned((high - low) * itemsize)
            # A copy, because the caller's tile goes back to the ring before this write has ended.
            buffer = self._behind.take(nbytes)
            buffer[: (high - low) * itemsize].view(self._dtype).copy_(values[low:high])
            offset = self._offset + (start + low) * itemsize
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
        self._transfer = transfer
        self._buffer = buffer
        self._numel = numel
        self._dtype = dtype
        self._link = link

    def wait(self) -> None:
        self._transfer.wait()

    def values(self) -> Tensor:
        """Return the values, which stay until :meth:`release`."""
        return self._buffer[: self._numel * self._dtype.itemsize].view(self._dtype)

    def release(self) -> None:
        """Return the buffer to the pool; the device may still be copying from it."""
        self._link.give_back(self._buffer)
