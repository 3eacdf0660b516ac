"""Averages tensors over the ranks in one bit an element, with error feedback on both hops.

Note [Error feedback]. Signs lose most of a value. The loss is added to what is sent next (1-bit Adam, arXiv
2102.02888, Algorithm 1), so that the sum of what was sent stays close to the sum of what was meant. Both hops
do so, with x what a rank has of a unit and S(c) what the signs of c stand for:

- to the serving ranks: c = x + e, and e = c - S(c) afterwards, for the whole unit (``values`` of ``begin``);
- from a serving rank to all: c = mean of S + e, and e = c - S(c), for the part that it serves (``_lost``).

An error belongs to one sequence of values. It is forgotten when the next values are of something else: after
a load, for units that are gone, and when gradients give way to momentum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...cuda_ops.signs import compress, expand, expand_sum, packed_bytes
from ..comm.collectives import Comm
from ..comm.link import all_gather_flat
from ..comm.pending import DONE, Pending, Work, waits
from ..zero.store import TileView
from ..zero.unit import Unit
from .collective import ParameterPart, TileWork, gradients
from .lamb import update_moments
from .update_rule import State

# -- sign exchange ----------------------------------------------------------------------------------


BYTES = "bytes of signs"
"""Counts, in ``comm.moved``, what this rank's collectives move, by the rules of ``Comm.moved``."""


@dataclass(slots=True)
class Sent:
    """Holds what ranks send to each other."""

    _got: Tensor
    _pending: Pending = DONE

    def result(self) -> Tensor:
        """Wait, and return what has come."""
        self._pending.wait()
        return self._got


@dataclass(slots=True)
class Average:
    """Describes an average that is being made."""

    values: Tensor
    stays: float | None
    unit: Unit
    sent: Sent


class SignExchange:
    """Averages units. A rank serves one of the equal parts of each: it gets the signs of all ranks there, and
    sends the signs of their mean to all.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._lost: dict[Unit, Tensor] = {}
        """Keeps what the second hop has lost of this rank's part of a unit."""
        self._last: dict[Unit, Tensor] = {}
        """Keeps the signs of a unit's last mean, if a part of it stays."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._comm.world_size

    def forget(self) -> None:
        """Forget what was lost."""
        self._lost.clear()
        self._last.clear()

    def keep_only(self, units: Collection[Unit]) -> None:
        """Forget units that are not there any more."""
        for kept in (self._lost, self._last):
            for unit in [each for each in kept if each not in units]:
                del kept[unit]

    def begin(
        self, unit: Unit, values: Tensor, addend: Tensor, *, alpha: float, stays: float | None = None
    ) -> Average:
        """Begin to average all ranks' ``values + alpha * addend``: send signs to those that serve the parts.
        What this rank's signs have lost is left in ``values`` (flat, of the unit's size, fp32 or float64),
        and at the end ``stays`` times the mean, if given. Collective.
        """
        size = self._comm.world_size
        s = values.numel() // size
        # A row for each serving rank: all_to_all_single sends row i to rank i.
        rows = torch.empty(size, packed_bytes(s), dtype=torch.uint8, device=values.device)
        # values + alpha * addend becomes signs in the rows, and their loss in values: see Note [Error
        # feedback].
        compress(values, rows, addend=addend, alpha=alpha)
        return Average(values, stays, unit, self._to_servers(rows))

    def serve(self, average: Average) -> None:
        """Average this rank's part, and send the signs of the mean to all. Collective."""
        rows = average.sent.result()
        s = average.values.numel() // len(rows)
        mean = torch.empty(s, dtype=average.values.dtype, device=rows.device)
        # Rows are added in the order of the ranks on every server, so the mean has the same bits in each run.
        expand_sum(rows, mean, factor=1.0 / len(rows))
        lost = self._lost.get(average.unit)
        own = torch.empty_like(rows[0])
        # compress() leaves in its first argument what the signs lose: the next error.
        if lost is None:
            compress(mean, own)
            self._lost[average.unit] = mean
        else:
            compress(lost, own, addend=mean)
        average.sent = self._to_all(own)

    def end(self, average: Average) -> Tensor:
        """Return the mean as signs give it, which is equal on all ranks."""
        values = average.values
        stays = average.stays
        size = self._comm.world_size
        found = torch.empty_like(values)
        rows = average.sent.result().view(size, -1)
        if stays is not None:
            # Signs, not values: about a thirty-second of the memory.
            self._last[average.unit] = rows
        expand(rows, found, into=values if stays else None, alpha=stays or 0.0)
        return found

    def add_last(self, unit: Unit, values: Tensor, alpha: float) -> None:
        """Add ``alpha`` times the last mean of which a part stayed to ``values``."""
        expand(self._last[unit], torch.empty_like(values), into=values, alpha=alpha)

    def _to_servers(self, rows: Tensor) -> Sent:
        """Send a row to each rank; the result are the rows of all ranks for this one."""
        if self._comm.world_size == 1:
            return Sent(rows)
        got = torch.empty_like(rows)
        self._comm.moved[BYTES] += rows.numel()

        def start() -> Work:
            work = dist.all_to_all_single(got, rows, group=self._comm.data.reduce_group, async_op=True)
            return self._work(work, got, rows)

        return Sent(got, self._comm.observe("all_to_all", rows.numel(), start))

    def _to_all(self, own: Tensor) -> Sent:
        """Send a flat tensor to all ranks; the result are those of all, one after the other."""
        if self._comm.world_size == 1:
            return Sent(own)
        found = torch.empty(self._comm.world_size * own.numel(), dtype=own.dtype, device=own.device)
        self._comm.moved[BYTES] += found.nbytes

        def start() -> Work:
            work = all_gather_flat(found, own, group=self._comm.data.reduce_group, async_op=True)
            return self._work(work, found, own)

        return Sent(found, self._comm.observe("all_gather", found.nbytes, start))

    def gather(self, own: Tensor) -> Tensor:
        """Return the flat tensors of all ranks, one after the other. Collective."""
        return self._to_all(own).result()

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place. Collective."""
        if self._comm.world_size > 1:
            group = self._comm.data.reduce_group

            def start() -> Work:
                return self._work(dist.all_reduce(tensor, group=group, async_op=True), tensor)

            self._comm.observe("all_reduce", tensor.nbytes, start).wait()

    def largest(self, tensor: Tensor) -> None:
        """Replace elements by the largest of all ranks, in place. Collective."""
        if self._comm.world_size > 1:
            group = self._comm.data.reduce_group
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
            self._work(work, tensor).wait()

    def _work(self, work: object, *tensors: Tensor) -> Work:
        key = waits.next_key(self._comm.number, "signs")
        return Work(work, key, "exchanges the signs of momentum", *tensors)


# -- unit step ----------------------------------------------------------------------------------------------
#
# Describes the step of one unit by a 1-bit optimizer.


@dataclass(frozen=True, slots=True)
class OneBitUnitStep:
    """Describes the step of one unit."""

    unit: Unit
    parts: Sequence[ParameterPart]
    """Lists this rank's parts of it, those without a gradient, too."""
    work: Sequence[TileWork]
    """Lists the tiles of those with one."""
    groups: Sequence[dict[str, Any]]
    divisor: float
    state: State
    frozen: bool
    """Tells that the variance stays as it is."""
    averaged: Tensor | None = None
    """This rank's shard of the exchanged average, on the shard's device: of the gradients, or if ``frozen``,
    of the new momentum. None: the tiles have the averaged gradient.
    """

    def bring_moments(
        self, parts: Sequence[ParameterPart], view: TileView, states: Sequence[dict[str, Tensor]]
    ) -> None:
        """Bring the moments of one group's parts in a tile up to date."""
        first, second = ([each[name] for each in states] for name in ("exp_avg", "exp_avg_sq"))
        betas = self.groups[parts[0].group]["betas"]
        if self.averaged is None:
            found = gradients(parts, view, self.divisor)
        else:
            at = self.unit.start
            found = [self.averaged[part.low - at : part.high - at] for part in parts]
        # Only dense gradients teach the variance: signs have one length for a whole block.
        if self.averaged is None and not self.frozen:
            update_moments(first, second, found, betas)
            return
        # Once the variance is frozen, ranks exchange the momentum itself; before that, 0/1 Adam exchanges
        # gradients.
        if self.averaged is not None and self.frozen:
            torch._foreach_copy_(first, found)
        else:
            torch._foreach_lerp_(first, found, 1 - float(betas[0]))
        clear_without_variance(first, second)


def clear_without_variance(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Set elements of ``first`` to 0 where the variance is 0: what never had a gradient has nothing to divide
    by, and the sign of nothing is no direction. Every step that leaves the variance as it is needs this.
    """
    torch._foreach_mul_(list(first), torch._foreach_sign(list(second)))
