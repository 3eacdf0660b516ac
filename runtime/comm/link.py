"""Runs collectives within one group of ranks.

Note [Two channels]. The collectives of one process group must start in one order on all of its ranks. Gathers
follow the forward pass and its prefetches, reductions the ends of units in the backward pass, and how the two
interleave may differ between ranks. Each kind therefore has a channel: a separate process group, or in shared
memory separate sequence numbers. Within a channel all ranks have one order, and ``Order`` compares it
(``collectives.py``). Between the channels there is no order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .pending import DONE, Key, Noted, Pending, Work, sum_pieces
from .shared_memory import SharedMemory

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ALIGN_NUMEL = 16
"""Sets the multiple of elements at which parameters, and parts of a unit, start: 32 or 64 bytes, for vector
loads.
"""
GATHER = 0
REDUCE = 1
"""Number the channels: collectives of one kind are issued in one order on all ranks."""
Note = tuple[Key, str]
"""Names a collective for the watch: its key, and what this rank does in words."""


class RankLink:
    """Runs the collectives of a group, in which this rank has the place ``position``.

    Reductions have a separate process group, so that they neither wait for gathers nor need to be issued in
    one common order with them (Note [Two channels]). ``shared`` memory, where there is any, is used instead
    of both.
    """

    def __init__(
        self, device: torch.device, size: int, position: int, gather_group: Any, reduce_group: Any
    ) -> None:
        self.device = device
        self.size = size
        self.position = position
        self.shards = size
        """Counts the equal parts that a unit is cut into; this rank keeps part ``position``."""
        self.pieces = size
        """Counts the equal pieces in which a unit travels, a multiple of ``shards``."""
        self.gather_group = gather_group
        self.reduce_group = reduce_group
        self.shared: SharedMemory | None = None
        self._native_reduce_scatter = device.type != "cpu"

    @property
    def gathers_on_any_stream(self) -> bool:
        """Tell whether a gather may start on another stream than the one that waits for it: on a GPU, if it
        is a single collective that allocates nothing.
        """
        return self.device.type == "cuda" and self.size > 1

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of a flat tensor of the group."""
        s = tensor.numel() // self.size
        return tensor[self.position * s : (self.position + 1) * s]

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        """Start to fill ``full`` (size * s elements) from every member's ``source`` (s).

        ``rounded``: in fewer bits on the way, as :meth:`rounds` has allowed.
        """
        own = self.part_of(full)
        if own.data_ptr() != source.data_ptr():
            # The source may have another dtype (master values): the copy casts it.
            own.copy_(source, non_blocking=True)
        if self.size == 1:
            return DONE
        if self.shared is not None:
            return Noted(self.shared.all_gather(GATHER, full, source, label), *note)
        return Work(all_gather_flat(full, own, group=self.gather_group, async_op=True), *note, full)

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        """Start to fill ``shard`` (s, any dtype) with this rank's slice of the sum of ``bucket`` (size * s).

        gloo's own reduce-scatter is an all-reduce of a clone, twice the bytes; an all-to-all with a local sum
        in the shard's (wider) dtype is faster and more exact.
        """
        if self.size == 1:
            shard.copy_(bucket)
            return DONE
        if self.shared is not None:
            return Noted(self.shared.reduce_scatter(REDUCE, shard, bucket, label), *note)
        if self._native_reduce_scatter:
            # NCCL sums in the dtype that it sends, so a wider shard is filled from a sum in the bucket's.
            direct = shard.dtype == bucket.dtype
            pieces = shard if direct else torch.empty_like(shard, dtype=bucket.dtype)
            sent = reduce_scatter_flat(pieces, bucket, group=self.reduce_group, async_op=True)
            work = Work(sent, *note, bucket)
            return work if direct else work.then(lambda: sum_pieces(shard, pieces.view(1, -1)))
        pieces = torch.empty_like(bucket)
        sent = dist.all_to_all_single(pieces, bucket, group=self.reduce_group, async_op=True)
        work = Work(sent, *note, bucket)
        # This rank's piece first, then the others by rank: sums in shared memory have that order, so both
        # give the same bits.
        return work.then(lambda: sum_pieces(shard, pieces.view(self.size, -1), self.position))

    def rounds(self, trained: bool) -> bool:
        """Tell whether gathers of trained or of frozen parameters may be rounded on their way."""
        return False

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the narrowest dtype that holds a reduced shard of a ``dtype`` bucket unrounded."""
        if self.size == 1 or self._native_reduce_scatter:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def all_reduce(self, tensor: Tensor, label: int, note: Note) -> Pending:
        """Start to sum ``tensor`` (its size a multiple of the group's) over the group in place."""
        if self.size == 1:
            return DONE
        if self.shared is not None:
            return Noted(self.shared.all_reduce(REDUCE, tensor, label), *note)
        return Work(dist.all_reduce(tensor, group=self.reduce_group, async_op=True), *note, tensor)

    def changed(self, label: int) -> None:
        """Note that the values of a labelled tensor are new ones: no copy of the former may be used."""

    def forget(self, label: int) -> None:
        """Drop what is kept of a labelled tensor, which is not sent again."""

    def release(self) -> None:
        """Let go of the process groups, which have ended."""
        self.gather_group = self.reduce_group = None

    def drain(self) -> None:
        """Finish what cannot go on without this rank's help. All ranks must call it."""
        if self.shared is not None:
            self.shared.drain()
