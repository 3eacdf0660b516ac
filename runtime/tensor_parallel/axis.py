"""Defines the ranks that share each layer, and what autograd does where their parts meet."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Work
from ..comm.waits import waits
from ..zero import placeholder
from .own_numbers import OwnNumbers

_CHANNEL = "tensor"


class TensorAxis:
    """Runs the collectives of the ranks that share each layer, which have consecutive numbers.

    ``comm.moved["tensor"]`` counts the elements of its sums twice and of its gathers once.
    """

    def __init__(self, comm: Comm) -> None:
        """Find this rank's place; :meth:`open` makes the process group."""
        self.comm = comm
        self.size = comm.mesh.tensor
        self.position = comm.rank % self.size
        self.first = comm.rank - self.position
        self.group: Any = None
        self.entered: tuple[weakref.ref[Tensor], tuple[int, bool], Tensor] | None = None
        """Keeps the last value that was entered, when, and as what: layers that compute with the same value
        get the same, so that autograd adds up their gradients and one sum serves them all.
        """
        self.own_numbers: OwnNumbers | None = None
        """Seeds what modules between cut layers draw, where a model has dropout."""

    def open(self) -> None:
        """Make the process group. Collective for all ranks."""
        self.group = self.make_group(range(self.size))
        axes[self.comm] = self

    def __deepcopy__(self, memo: Any) -> TensorAxis:
        return self  # a copy of a model computes with the same ranks

    def make_group(self, places: Sequence[int]) -> Any:
        """Make a group of some places of each axis; return this rank's, or None. Collective for all ranks."""
        found = None
        for first in range(0, self.comm.world_size, self.size):
            ranks = [first + place for place in places]
            group = self.comm.new_group(ranks)
            if self.comm.rank in ranks:
                found = group
        return found

    def sum(self, tensor: Tensor, group: Any = None) -> Tensor:
        """Sum a contiguous tensor in place over the axis, or over a group of it; return it."""
        self.comm._count("tensor", 2 * tensor.numel())
        return self._reduce(tensor, dist.ReduceOp.SUM, group)

    def largest(self, tensor: Tensor) -> Tensor:
        """Replace each element by the largest of the axis, in place; return it."""
        self.comm._count("tensor", 2 * tensor.numel())
        return self._reduce(tensor, dist.ReduceOp.MAX, None)

    def _reduce(self, tensor: Tensor, operation: Any, group: Any) -> Tensor:
        work = dist.all_reduce(tensor, operation, group=group or self.group, async_op=True)
        is_sum = operation == dist.ReduceOp.SUM
        self._wait(
            work, tensor, "sums the parts of a layer" if is_sum else "compares numbers, as of a batch,"
        )
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, joined along the last dimension."""
        return torch.cat(self.gather_all(part.contiguous()), -1)

    def gather_all(self, part: Tensor) -> list[Tensor]:
        """Return the parts of all ranks; ``part`` is contiguous."""
        self.comm._count("tensor", part.numel() * self.size)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        work = dist.all_gather(parts, part, group=self.group, async_op=True)
        self._wait(work, part, "gathers the parts of a tensor, as state_dict does,")
        return parts

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the last dimension."""
        width = whole.shape[-1] // self.size
        return whole.narrow(-1, self.position * width, width).contiguous()

    def _wait(self, work: Any, tensor: Tensor, what: str) -> None:
        """Wait for a collective; each kind has a channel, so that the watch sees ranks in different ones."""
        key = waits.next_key(self.comm.number, f"{_CHANNEL}: {what}")
        Work(work, key, f"{what} with the ranks that share each layer", tensor).wait()


axes: WeakKeyDictionary[Comm, TensorAxis] = WeakKeyDictionary()
"""Holds the axis of each communicator that has one."""


class _Enter(torch.autograd.Function):
    """Hands a value that all ranks have to their parts: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return leave(gradient, ctx.axis), None


class _Leave(torch.autograd.Function):
    """Sums the parts' values: each part's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.sum(value.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return enter(gradient, ctx.axis), None


class _Join(torch.autograd.Function):
    """Joins the parts along the last dimension."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.gather(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return split(gradient, ctx.axis), None


class _Split(torch.autograd.Function):
    """Takes this rank's part of the last dimension."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.own(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return join(gradient, ctx.axis), None


def enter(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return a value that all ranks of the axis have, for computing different parts with it."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    moment = value._version, placeholder.in_backward()
    if axis.entered is not None:
        known, when, entered = axis.entered
        if known() is value and when == moment:
            return entered
    found: Tensor = _Enter.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    axis.entered = weakref.ref(value), moment, found
    return found


def leave(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return the sum of the parts' values."""
    found: Tensor = _Leave.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    return found


def join(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return the parts' values, joined along the last dimension."""
    found: Tensor = _Join.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    return found


def split(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return this rank's part of the last dimension of a value that all ranks have."""
    found: Tensor = _Split.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    return found
