"""Where the reduced gradient of a unit goes when it does not stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...cuda_ops.norm import sum_of_squares
from ..pending import DONE, Pending
from .link import HostLink

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
    """Sums of squares, 0-dim float64, of ranges of a flat tensor."""
    if grad.dtype == torch.float64:
        return [grad[start:stop].square().sum() for start, stop in cuts]
    return [sum_of_squares(grad[start:stop]) for start, stop in cuts]


class HostGradient:
    """A unit's gradient shard in host memory.

    The first micro-batch's stays in the dtype it was reduced in; from the second on, the sum is kept in fp32.
    Additions wait for their copy only when the sum is next needed, so that copies run beside the backward
    pass.
    """

    def __init__(self, link: HostLink, cuts: Cuts) -> None:
        self._link, self._cuts = link, cuts
        self._landing: Tensor | None = None
        self._total: Tensor | None = None
        self._arrival: Pending = DONE
        self._source: Tensor | None = None
        self._summing = self._adding = False
        self._squares: list[Tensor] | None = None
        self.delivered = False
        self.reader: Pending = DONE

    def deliver(self, shard: Tensor, *, fresh: bool, stays: bool) -> None:
        self.reader.wait()
        self.reader = DONE
        self._finish()
        if self._landing is None or self._landing.dtype != shard.dtype:
            self._landing = self._link.empty(shard.numel(), shard.dtype)
        if fresh:
            self._squares, self._summing = squares_of(shard, self._cuts), False
        else:
            if not self._summing:
                if self._total is None:
                    wide = torch.promote_types(shard.dtype, torch.float32)
                    self._total = self._link.empty(shard.numel(), wide)
                self._total.copy_(self._landing)
            self._squares, self._summing, self._adding = None, True, True
        self._source, self._arrival = shard, self._link.download(shard, self._landing)
        self.delivered = True

    def _finish(self) -> None:
        self._arrival.wait()
        self._arrival, self._source = DONE, None
        if self._adding:
            assert self._total is not None and self._landing is not None
            self._total.add_(self._landing)
            self._adding = False

    @property
    def grad(self) -> Tensor:
        """The gradient, once it has arrived: flat, fp32 or the dtype it was reduced in."""
        self._finish()
        grad = self._total if self._summing else self._landing
        assert grad is not None
        return grad

    def changed(self) -> None:
        """Somebody has written to :attr:`grad`."""
        self._squares = None

    def squares(self) -> list[Tensor]:
        return squares_of(self.grad, self._cuts) if self._squares is None else self._squares
