"""Defines the collectives of an axis that autograd differentiates.

Note [Collectives and their gradients]
    Each function is written for any axis. Its gradient is another function of the table, which can be
    differentiated again.

    ================  ==========================================  ============================
    function          result                                      gradient
    ================  ==========================================  ============================
    ``copy_to``       the value, with which each rank's shard     ``reduce_from``
                      computes
    ``reduce_from``   the sum of the ranks' values                ``copy_to``
    ``gather_from``   the ranks' shards, joined                   ``scatter_to``
    ``scatter_to``    this rank's shard                           ``gather_from``
    ``gather_to``     the ranks' shards, joined, with which each  ``sum_to_shard``
                      rank's shard of the weights computes
    ``sum_to_shard``  this rank's shard of the sum                ``gather_to``
    ``all_to_all``    what the ranks have sent to this one        ``all_to_all``, the inverse
    ``total``         the sum, in a loss that all ranks compute   the gradient, times the size
    ================  ==========================================  ============================

    A replicated value that meets shards without ``copy_to`` or ``scatter_to`` gets one rank's share of its
    gradient. ``total`` multiplies because the ranks' gradients are divided by their number later
    (Note [Averaging]).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.axis import Axis, Channel
from ..zero import placeholder

# -- copy and reduce --------------------------------------------------------------------------------


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, channel: Channel) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_from(gradient, ctx.axis, ctx.channel), None, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, channel: Channel, in_place: bool) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        if in_place:
            ctx.mark_dirty(value)
        else:
            value = value.clone(memory_format=torch.contiguous_format)
        return axis.sum(value, channel)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return copy_to(gradient, ctx.axis, ctx.channel), None, None, None


def copy_to(
    value: Tensor, axis: Axis, channel: Channel, make: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return a replicated value, for computing with this rank's shard.

    Layers that compute with the same value get the same copy: autograd adds up their gradients, and one sum
    serves them all. ``make`` makes the copy, if there is none.
    """
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    moment = value._version, placeholder.in_backward(), channel
    if axis.last_copy is not None:
        known, when, copy = axis.last_copy
        if known() is value and when == moment:
            return copy
    found: Tensor
    if make is None:
        found = _CopyTo.apply(value, axis, channel)  # type: ignore[no-untyped-call]  # torch does not type it
    else:
        found = make(value)
    axis.last_copy = weakref.ref(value), moment, found
    if axis.follow is not None:
        axis.follow(found, value)
    return found


def reduce_from(value: Tensor, axis: Axis, channel: Channel, *, owned: bool = False) -> Tensor:
    """Return the sum of the ranks' values.

    With ``owned``, the sum is computed in ``value``, which nobody else uses and whose operation has not saved
    it for its gradient: a product's result, not an exponential's. A gradient is never owned:
    autograd may hand the same tensor to several operations.
    """
    in_place = owned and value.is_contiguous()
    found: Tensor = _ReduceFrom.apply(value, axis, channel, in_place)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.follow is not None:
        axis.follow(found, None)
    return found


class GradientSum:
    """Sums the gradient of a replicated parameter that shards use: a hook on the parameter."""

    def __init__(self, axis: Axis, channel: Channel) -> None:
        self.axis = axis
        self.channel = channel

    def __call__(self, gradient: Tensor) -> Tensor:
        return self.axis.sum(gradient.clone(memory_format=torch.contiguous_format), self.channel)


# -- gather and scatter -----------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """Joins shards; ``divide`` makes this rank's shard of the gradient: `scatter_to` or `sum_to_shard`."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, axis: Axis, channel: Channel, dim: int, divide: Callable[..., Tensor]
    ) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        ctx.dim = dim
        ctx.divide = divide
        return torch.cat(axis.all_gather(shard.contiguous(), channel), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.divide(gradient, ctx.axis, ctx.channel, ctx.dim), None, None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, channel: Channel, dim: int) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        ctx.dim = dim
        width = value.shape[dim] // axis.size
        return value.narrow(dim, axis.rank * width, width).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_from(gradient, ctx.axis, ctx.channel, ctx.dim), None, None, None


def gather_from(shard: Tensor, axis: Axis, channel: Channel, dim: int = -1) -> Tensor:
    """Return the ranks' shards, joined along a dimension."""
    found: Tensor = _Gather.apply(shard, axis, channel, dim, scatter_to)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.follow is not None:
        axis.follow(found, None)
    return found


def scatter_to(value: Tensor, axis: Axis, channel: Channel, dim: int = -1) -> Tensor:
    """Return this rank's shard of a replicated value, along a dimension. ``channel`` is for the gradient: the
    shard is taken without a collective.
    """
    found: Tensor = _ScatterTo.apply(value, axis, channel, dim)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.follow is not None:
        axis.follow(found, value)
    return found


# -- gather and sum ---------------------------------------------------------------------------------


class _SumToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, channel: Channel, dim: int) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        ctx.dim = dim
        return axis.reduce_scatter(value.movedim(dim, 0), channel).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_to(gradient, ctx.axis, ctx.channel, ctx.dim), None, None, None


def gather_to(shard: Tensor, axis: Axis, channel: Channel, dim: int) -> Tensor:
    """Return the ranks' shards, joined along a dimension, for computing with this rank's shard of weights."""
    found: Tensor = _Gather.apply(shard, axis, channel, dim, sum_to_shard)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.follow is not None:
        axis.follow(found, shard)
    return found


def sum_to_shard(value: Tensor, axis: Axis, channel: Channel, dim: int) -> Tensor:
    """Return this rank's shard of the sum of the ranks' values, along a dimension."""
    found: Tensor = _SumToShard.apply(value, axis, channel, dim)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.follow is not None:
        axis.follow(found, value)
    return found


# -- all-to-all -------------------------------------------------------------------------------------


class RowExchange(NamedTuple):
    """Exchanges rows of tensors, with one collective for each tensor."""

    sent: Sequence[int]
    """The number of consecutive rows to each rank."""
    received: Sequence[int]
    """The number of rows from each rank."""

    @property
    def inverse(self) -> RowExchange:
        """Return the exchange that sends all rows back."""
        return RowExchange(self.received, self.sent)

    def run(self, axis: Axis, channel: Channel, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the rows that the ranks have sent."""
        return tuple(axis.all_to_all(each, channel, self.sent, self.received) for each in tensors)


class DimExchange(NamedTuple):
    """Turns shards along the dimension ``joined`` into shards along the dimension ``split``, with one
    collective for all tensors, which have one dtype.
    """

    split: int
    joined: int

    @property
    def inverse(self) -> DimExchange:
        """Return the exchange that undoes this one."""
        return DimExchange(self.joined, self.split)

    def run(self, axis: Axis, channel: Channel, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return this rank's shards along ``split``, joined along ``joined`` from all ranks."""
        size = axis.size
        pieces = []
        for each in tensors:
            shape = list(each.shape)
            shape[self.split : self.split + 1] = [size, shape[self.split] // size]
            pieces.append(each.contiguous().view(shape).movedim(self.split, 0))
        sent = torch.cat([piece.reshape(size, -1) for piece in pieces], 1)
        received = axis.all_to_all(sent, channel)
        found = []
        shards = torch.split(received, [math.prod(piece.shape[1:]) for piece in pieces], 1)
        for shard, piece in zip(shards, pieces, strict=True):
            full = shard.reshape(piece.shape).movedim(0, self.joined)
            shape = list(full.shape)
            shape[self.joined : self.joined + 2] = [shape[self.joined] * shape[self.joined + 1]]
            found.append(full.reshape(shape))
        return tuple(found)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: Axis, channel: Channel, exchange: RowExchange | DimExchange, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.channel = channel
        ctx.exchange = exchange
        return exchange.run(axis, channel, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *all_to_all(ctx.axis, ctx.channel, ctx.exchange.inverse, *gradients)


def all_to_all(
    axis: Axis, channel: Channel, exchange: RowExchange | DimExchange, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Exchange tensors between the ranks. The gradients of all tensors travel back, in one order on all
    ranks, also where a rank needs only some of them.
    """
    found: tuple[Tensor, ...] = _AllToAll.apply(axis, channel, exchange, *tensors)  # type: ignore[no-untyped-call]  # torch does not type it
    return found


# -- total ------------------------------------------------------------------------------------------


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, channel: Channel) -> Tensor:
        ctx.size = axis.size
        return axis.sum(value.clone(memory_format=torch.contiguous_format), channel)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.size, None, None


def total(value: Tensor, axis: Axis, channel: Channel) -> Tensor:
    """Return the sum of the ranks' values, as part of a loss that all ranks of the axis compute alike."""
    found: Tensor = _Total.apply(value, axis, channel)  # type: ignore[no-untyped-call]  # torch does not type it
    return found
