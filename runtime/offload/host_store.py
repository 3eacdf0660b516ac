"""Keeps shards of units in host memory: values, master values and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.pending import DONE, Pending
from ..zero.layout import Range
from ..zero.store import Access, OpenTile, ShardReader, ShardStore, TileView, ValueStore, squares_of
from .buffers import BufferQueue
from .transfer import HostLink


class HostValues(ValueStore):
    """Keeps a unit's shard in host memory, in the compute dtype."""

    def __init__(self, link: HostLink, tensor: Tensor) -> None:
        """Keep ``tensor``, which has the first values."""
        super().__init__(tensor)
        self._link = link
        self.is_gathered_directly = not link.cuda
        self._sent: Pending = DONE
        """Represents new values on their way from the device."""

    def start_gather(self, unit: ShardReader) -> Pending:
        """Copy the shard to the device, then gather."""
        if self.is_gathered_directly or self.tensor is None:
            return super().start_gather(unit)
        own = unit.own_part()
        upload = self._link.upload(self.tensor, own, self._link.mark(), self._sent.event)
        with self._link.behind_uploads():
            return upload.then(unit.gather_from(own).wait)

    def write(self, start: int, values: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        """Replace elements; what comes from the device arrives later (:meth:`flush`)."""
        assert self.tensor is not None
        target = self.tensor[start : start + values.numel()]
        if values.device.type != target.device.type:
            self._sent = self._link.download(values.to(target.dtype), target)
        elif target.data_ptr() != values.data_ptr():
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
        self._link, self._buffers, self._dtype = link, buffers, dtype
        self._landing: Tensor | None = None
        """Keeps memory for a first gradient."""
        self._sum: Tensor | None = None
        """Keeps memory for a sum."""
        self._home: Tensor | None = None
        """Holds the gradient, once it has arrived: one of the two."""
        self._arrival: Pending = DONE
        self._source: Tensor | None = None
        self._squares: list[Tensor] | None = None
        self._rest = torch.float32

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

    def room_for_grad(self, first: bool, dtype: torch.dtype, rest: torch.dtype) -> Tensor:
        """Return memory on the device."""
        assert self.master is not None
        self._rest = rest
        return torch.empty(self.master.numel(), dtype=dtype, device=self._link.device)

    def add_grad(self, shard: Tensor, *, first: bool, stays: bool) -> None:
        """Start to copy a gradient, or its sum with the former ones, to the host."""
        self.reader.wait()
        self.reader = DONE
        if first:
            if self._landing is None or self._landing.dtype != shard.dtype:
                self._landing = self._link.empty(shard.numel(), shard.dtype)
            total, self._home = shard, self._landing
        else:
            total = self._added(shard)
            if self._sum is None:
                self._sum = self._link.empty(total.numel(), total.dtype)
            self._home = self._sum
        self._squares = squares_of([total[start:stop] for start, stop in self.cuts])
        self._source, self._arrival = total, self._link.download(total, self._home)
        self.has_grad = True

    def _added(self, shard: Tensor) -> Tensor:
        """Copy the sum so far to the device, and add a gradient."""
        assert self._home is not None
        there = torch.empty_like(self._home, device=shard.device)
        self._link.upload(self._home, there, self._link.mark(), self._arrival.event).wait()
        return there.to(self._rest).add_(shard)

    def grad(self) -> Tensor:
        """Return the gradient, once it has arrived: fp32, or the dtype it was reduced in."""
        self._arrival.wait()
        self._arrival, self._source = DONE, None
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
        self._buffers, self._buffer, self._sent = buffers, buffer, DONE

    def publish(self, after: torch.cuda.Event | None = None) -> Pending:
        self._sent = super().publish(after)
        return self._sent

    def close(self) -> None:
        self._buffers.give_back(self._buffer, self._sent.synchronize)

    def abandon(self) -> None:
        self.close()
