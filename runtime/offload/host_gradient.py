"""Where the reduced gradient of a unit goes when it does not stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...cuda_ops.norm import sums_of_squares
from ..comm.pending import DONE, Pending
from .transfer import HostLink, end_of

Cuts = Sequence[tuple[int, int]]
"""Ranges of a shard whose sums of squares are wanted."""


class GradientHome(Protocol):
    """What the reducer gives a unit's reduced shard to, once for each backward pass."""

    delivered: bool
    """Whether it holds anything of a step."""
    reader: Pending
    """A step in the background that still reads it; waited for before anything is delivered."""

    def deliver(self, shard: Tensor, *, fresh: bool, stays: bool) -> None:
        """Take a reduced shard; ``fresh`` replaces what was there, else it is added. With ``stays`` the
        shard is left untouched until the step, so it need not be copied.
        """

    def squares(self) -> list[Tensor]:
        """Sums of squares of the ranges that were asked for, 0-dim float64."""

    @property
    def grad(self) -> Tensor:
        """The gradient, flat, in memory. Raises RuntimeError where it is on disk."""

    def changed(self) -> None:
        """Somebody has written to :attr:`grad`."""


def squares_of(grad: Tensor, cuts: Cuts) -> list[Tensor]:
    """Sum the squares of ranges of a flat tensor: 0-dim float64 each."""
    return squares_of_parts([grad[start:stop] for start, stop in cuts])


def squares_of_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """Sum the squares of flat tensors of one device: 0-dim float64 each, the same whatever the others are."""
    narrow = iter(sums_of_squares([part for part in parts if part.dtype != torch.float64]))
    return [part.square().sum() if part.dtype == torch.float64 else next(narrow) for part in parts]


class HostGradient:
    """A unit's gradient shard in host memory.

    The first micro-batch's stays in the dtype it was reduced in; from the second on, the sum is kept in fp32.
    It is added to on the device, to which it comes for that: copies run beside the backward pass, and the
    host waits for none of them.
    """

    def __init__(self, link: HostLink, cuts: Cuts) -> None:
        self._link, self._cuts = link, cuts
        self._landing: Tensor | None = None
        self._sum: Tensor | None = None
        self._arrival: Pending = DONE
        self._source: Tensor | None = None
        self._summing = False
        self._squares: list[Tensor] | None = None
        self.delivered = False
        self.reader: Pending = DONE

    def deliver(self, shard: Tensor, *, fresh: bool, stays: bool) -> None:
        self.reader.wait()
        self.reader = DONE
        if fresh:
            if self._landing is None or self._landing.dtype != shard.dtype:
                self._landing = self._link.empty(shard.numel(), shard.dtype)
            total, home, self._summing = shard, self._landing, False
        else:
            total, home = self._added(shard), self._room_for_sum(shard)
            self._summing = True
        self._squares = squares_of(total, self._cuts)
        self._source, self._arrival = total, self._link.download(total, home)
        self.delivered = True

    def _added(self, shard: Tensor) -> Tensor:
        """The sum so far, brought to the device, and the shard."""
        before = self._sum if self._summing else self._landing
        assert before is not None
        there = torch.empty_like(before, device=shard.device)
        self._link.upload(before, there, self._link.mark(), end_of(self._arrival)).wait()
        return there.to(torch.promote_types(shard.dtype, torch.float32)).add_(shard)

    def _room_for_sum(self, shard: Tensor) -> Tensor:
        if self._sum is None:
            self._sum = self._link.empty(shard.numel(), torch.promote_types(shard.dtype, torch.float32))
        return self._sum

    @property
    def grad(self) -> Tensor:
        """The gradient, once it has arrived: flat, fp32 or the dtype it was reduced in."""
        self._arrival.wait()
        self._arrival, self._source = DONE, None
        grad = self._sum if self._summing else self._landing
        assert grad is not None
        return grad

    def changed(self) -> None:
        """Somebody has written to :attr:`grad`."""
        self._squares = None

    def squares(self) -> list[Tensor]:
        return squares_of(self.grad, self._cuts) if self._squares is None else self._squares
