"""Defines the ranks that have different parts of each sequence, and what they exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.axis import Axis
from ..comm.collectives import Comm
from ..comm.pending import Work
from ..comm.process_group import open_comms, running_comm
from ..comm.waits import waits
from ..errors import ParameterError
from ..rank_mesh import own_group

_CHANNEL = "sequence"


class SequenceAxis(Axis):
    """Runs the collectives of the ranks that have different parts of the same sequences.

    ``comm.moved["sequence"]`` counts the elements that this rank sends, those to itself included.
    """

    name = "sequence"

    def __init__(self, comm: Comm) -> None:
        """Make the process group. Collective for all ranks."""
        super().__init__(comm)
        self.size = comm.mesh.sequence
        self.position = comm.mesh.coordinates(comm.rank)["sequence"]
        self.keep_group("passes", own_group(comm, "sequence"))
        self.attentions = 0
        """Counts the attentions that were computed on whole sequences."""
        self.positions: Tensor | None = None
        """The positions of whole sequences, (batch or 1, tokens), in the last pass of a known model."""

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of whole sequences. Raises ParameterError for an odd length."""
        length = whole.shape[dim]
        if length % self.size:
            raise ParameterError(
                f"sequence parallelism: {length} tokens cannot be divided by {self.size} ranks: pad "
                f"sequences to a multiple of {self.size}"
            )
        step = length // self.size
        return whole.narrow(dim, self.position * step, step)

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Return the parts of all ranks, joined along a dimension; without gradients."""
        part = part.detach().contiguous()
        self.comm._count(_CHANNEL, part.numel() * self.size)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(dist.all_gather(parts, part, group=self.group, async_op=True), part, "all-gathers")
        return torch.cat(parts, dim)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor in place over the axis; return it."""
        self.comm._count(_CHANNEL, 2 * tensor.numel())
        self._wait(dist.all_reduce(tensor, group=self.group, async_op=True), tensor, "sums the losses of")
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Replace each element by the largest of the axis, in place; return it. It serves checks alone."""
        self.comm._count(f"{_CHANNEL} checks", 2 * tensor.numel())
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._wait(work, tensor, "compares batches of")
        return tensor

    def exchange(self, tensors: Sequence[Tensor], cut: int, joined: int) -> list[Tensor]:
        """Send each rank its part of ``tensors`` along the dimension ``cut``; return what the ranks have
        sent, joined along the dimension ``joined``. One collective for all, of one dtype.
        """
        size, pieces = self.size, []
        for each in tensors:
            shape = list(each.shape)
            shape[cut : cut + 1] = [size, shape[cut] // size]
            pieces.append(each.view(shape).movedim(cut, 0))
        sent = torch.cat([piece.reshape(size, -1) for piece in pieces], 1)
        self.comm._count(_CHANNEL, sent.numel())
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        self._wait(work, received, "exchanges tokens and heads of")
        found = []
        parts = torch.split(received, [math.prod(piece.shape[1:]) for piece in pieces], 1)
        for part, piece in zip(parts, pieces, strict=True):
            whole = part.reshape(piece.shape).movedim(0, joined)
            shape = list(whole.shape)
            shape[joined : joined + 2] = [shape[joined] * shape[joined + 1]]
            found.append(whole.reshape(shape))
        return found

    def _wait(self, work: Any, tensor: Tensor, what: str) -> None:
        """Wait for a collective; each kind has a channel, so that the watch sees ranks in different ones."""
        key = waits.next_key(self.comm.number, f"{_CHANNEL}: {what}")
        Work(work, key, f"{what} sequences in its sequence-parallel group", tensor).wait()


def current_axis() -> SequenceAxis | None:
    """Return the axis of the engine whose forward or backward pass is going on; outside of all passes that of
    any engine, if all have the same size. None without one, where sequences are whole. Raises ParameterError
    outside of all passes where engines have different sizes.
    """
    comm = running_comm()
    if comm is None:
        if len({each.mesh.sequence for each in open_comms}) > 1:
            raise ParameterError(
                "zlaunch.sequence was called outside a model's forward, and this process has engines with "
                "different parallel.sequence sizes: call it inside the model's forward (also split, mean "
                "and total), or destroy the other engines first"
            )
        comm = max(open_comms, key=lambda each: int(each.number), default=None)
    found: SequenceAxis | None = None if comm is None else comm.axes.get(SequenceAxis.name)
    return found


class _Exchange(torch.autograd.Function):
    """Exchanges parts of several tensors, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, cut: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.cut, ctx.joined = axis, cut, joined
        return tuple(axis.exchange([each.contiguous() for each in tensors], cut, joined))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *exchange(ctx.axis, ctx.joined, ctx.cut, *gradients)


def exchange(axis: SequenceAxis, cut: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cut tensors along one dimension and join them along another, over the ranks of an axis."""
    found: tuple[Tensor, ...] = _Exchange.apply(axis, cut, joined, *tensors)  # type: ignore[no-untyped-call]  # torch does not type it
    return found


class _Total(torch.autograd.Function):
    """Sums a value over the axis. Every rank's loss depends on the sum, and the ranks' gradients are divided
    by their number later (Note [Averaging]): so each value's gradient is that of the sum, once for each rank.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: SequenceAxis) -> Tensor:
        ctx.size = axis.size
        return axis.sum(value.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.size, None


def total(value: Tensor, axis: SequenceAxis) -> Tensor:
    """Return the sum of the ranks' values, as part of a loss that all ranks of the axis compute alike."""
    found: Tensor = _Total.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    return found
