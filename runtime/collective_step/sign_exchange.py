"""Averages tensors over the ranks in one bit an element, with error feedback on both hops."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...cuda_ops.signs import compress, expand, packed_bytes
from ..comm.collectives import Comm
from ..comm.link import all_gather_flat
from ..comm.pending import Work
from ..comm.waits import waits
from ..zero.unit import Unit

BYTES = "bytes of signs"
"""Counts, in ``comm.moved``, what this rank's collectives move, by the rules of ``Comm.moved``."""


class SignExchange:
    """Averages units. A rank serves one of the equal parts of each: it gets the signs of all ranks there, and
    sends the signs of their mean to all.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._lost: dict[int, Tensor] = {}
        """Keeps, by the identity of a unit, what the second hop has lost of this rank's part."""

    def forget(self) -> None:
        """Forget what was lost."""
        self._lost.clear()

    def average(
        self, unit: Unit, values: Tensor, addend: Tensor, *, alpha: float, stays: float = 0.0
    ) -> Tensor:
        """Return the mean of all ranks' ``values + alpha * addend``, as signs give it; equal on all ranks.
        What this rank's signs have lost is left in ``values`` (flat, of the unit's size, fp32 or float64),
        and ``stays`` times the mean. Collective.
        """
        size = self._comm.world_size
        s = values.numel() // size
        rows = torch.empty(size, packed_bytes(s), dtype=torch.uint8, device=values.device)
        parts = [slice(start, start + s) for start in range(0, values.numel(), s)]
        for row, part in zip(rows, parts, strict=True):
            compress(values[part], row, addend=addend[part], alpha=alpha)
        mean = torch.empty(s, dtype=values.dtype, device=values.device)
        expand(self._to_servers(rows), mean, factor=1.0 / size)
        lost = self._lost.get(id(unit))
        own = torch.empty_like(rows[0])
        if lost is None:
            compress(mean, own)
            self._lost[id(unit)] = mean
        else:
            compress(lost, own, addend=mean)
        found = torch.empty_like(values)
        for row, part in zip(self.gather(own).view(size, -1), parts, strict=True):
            expand(row.unsqueeze(0), found[part], into=values[part] if stays else None, alpha=stays)
        return found

    def _to_servers(self, rows: Tensor) -> Tensor:
        """Send a row to each rank; return the rows of all ranks for this one."""
        if self._comm.world_size == 1:
            return rows
        got = torch.empty_like(rows)
        self._comm.moved[BYTES] += rows.numel()
        work = dist.all_to_all_single(got, rows, group=self._comm.data.reduce_group, async_op=True)
        self._wait(work, got, rows)
        return got

    def gather(self, own: Tensor) -> Tensor:
        """Return the flat tensors of all ranks, one after the other. Collective."""
        if self._comm.world_size == 1:
            return own
        found = torch.empty(self._comm.world_size * own.numel(), dtype=own.dtype, device=own.device)
        self._comm.moved[BYTES] += found.nbytes
        work = all_gather_flat(found, own, group=self._comm.data.reduce_group, async_op=True)
        self._wait(work, found, own)
        return found

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place. Collective."""
        if self._comm.world_size > 1:
            work = dist.all_reduce(tensor, group=self._comm.data.reduce_group, async_op=True)
            self._wait(work, tensor)

    def largest(self, tensor: Tensor) -> None:
        """Replace elements by the largest of all ranks, in place. Collective."""
        if self._comm.world_size > 1:
            group = self._comm.data.reduce_group
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
            self._wait(work, tensor)

    def _wait(self, work: object, *tensors: Tensor) -> None:
        key = waits.next_key(self._comm.number, "signs")
        Work(work, key, "exchanges the signs of momentum", *tensors).wait()
