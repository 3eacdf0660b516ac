"""Defines the ranks that share each layer, and what autograd does where their parts meet."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.axis import Axis
from ..comm.collectives import Comm
from ..comm.pending import Work
from ..comm.waits import waits
from ..zero import placeholder
from .own_numbers import OwnNumbers

_CHANNEL, _CHECKS, _STATES = "tensor", "tensor checks", "tensor states"


class Parts(Protocol):
    """Follows activations of which each rank has a part."""

    def note(self, output: Tensor, name: str) -> None: ...

    def clear(self) -> None: ...


class Wholes(Protocol):
    """Follows which activations each rank has whole."""

    def note_part(self, tensor: Tensor, source: Tensor | None = None) -> None: ...

    def note_mixed(self, tensor: Tensor) -> None: ...

    def note_whole(self, tensor: Tensor) -> None: ...

    def clear(self) -> None: ...


class OperationWatch(Protocol):
    """Looks at operations, as a context."""

    @property
    def parts(self) -> Parts: ...

    @property
    def wholes(self) -> Wholes: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any: ...


class TensorAxis(Axis):
    """Runs the collectives of the ranks that share each layer, which have consecutive numbers.

    ``comm.moved["tensor"]`` counts the elements of its sums twice and of its gathers once, ``"tensor
    checks"`` those of its checks.
    """

    name = "tensor"

    def __init__(self, comm: Comm) -> None:
        """Find this rank's place; :meth:`open` makes the process group."""
        super().__init__(comm)
        self.size = comm.mesh.tensor
        self.position = comm.rank % self.size
        self.first = comm.rank - self.position
        self.entered: tuple[weakref.ref[Tensor], tuple[int, bool], Tensor] | None = None
        """Keeps the last value that was entered, when, and as what: layers that compute with the same value
        get the same, so that autograd adds up their gradients and one sum serves them all.
        """
        self.watched: OperationWatch | None = None
        """Is what looks at operations in a pass that is going on."""
        self.own_numbers: OwnNumbers | None = None
        """Seeds what modules between cut layers draw, where a model has dropout."""

    def open(self) -> None:
        """Make the process groups: what a rank may wrongly do alone (states, checks) never meets what others
        do, so that the watch tells them apart, and no values are mixed. Collective for all ranks.
        """
        self.make_group("passes", range(self.size))
        self.make_group("states", range(self.size))
        if self.comm.device.type == "cpu":
            self.make_group("checks", range(self.size))
        else:  # a GPU's group takes memory, and no host waits for it
            self.keep_group("checks", self.group)

    def make_group(self, use: Hashable, places: Sequence[int]) -> None:
        """Make a group of some places of each axis, and keep this rank's. Collective for all ranks."""
        found = None
        for first in range(0, self.comm.world_size, self.size):
            ranks = [first + place for place in places]
            group = self.comm.new_group(ranks)
            if self.comm.rank in ranks:
                found = group
        self.keep_group(use, found)

    def sum(self, tensor: Tensor, use: Hashable = "passes") -> Tensor:
        """Sum a contiguous tensor in place over the axis, or over the group that is kept for another use;
        return it.
        """
        self.comm._count("tensor", 2 * tensor.numel())
        return self._reduce(tensor, dist.ReduceOp.SUM, use)

    def largest(self, tensor: Tensor) -> Tensor:
        """Replace each element by the largest of the axis, in place; return it."""
        self.comm._count("tensor", 2 * tensor.numel())
        return self._reduce(tensor, dist.ReduceOp.MAX, "passes")

    def largest_of_checks(self, tensor: Tensor) -> Tensor:
        """Do as ``largest``, apart from what layers compute."""
        self.comm._count("tensor checks", 2 * tensor.numel())
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group_for("checks"), async_op=True)
        key = waits.next_key(self.comm.number, _CHECKS)
        Work(work, key, "compares its batch in its tensor-parallel group", tensor).wait()
        return tensor

    def _reduce(self, tensor: Tensor, operation: Any, use: Hashable) -> Tensor:
        work = dist.all_reduce(tensor, operation, group=self.group_for(use), async_op=True)
        self._wait(work, tensor)
        return tensor

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, joined along the last dimension."""
        part = part.contiguous()
        self.comm._count("tensor", part.numel() * self.size)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(dist.all_gather(parts, part, group=self.group, async_op=True), part)
        return torch.cat(parts, -1)

    def gather_state(self, part: Tensor) -> list[Tensor]:
        """Return the parts that all ranks have of a parameter; ``part`` is contiguous."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        work = dist.all_gather(parts, part, group=self.group_for("states"), async_op=True)
        key = waits.next_key(self.comm.number, _STATES)
        Work(work, key, "all-gathers a parameter over its tensor-parallel group", part).wait()
        return parts

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the last dimension."""
        width = whole.shape[-1] // self.size
        return whole.narrow(-1, self.position * width, width).contiguous()

    def _wait(self, work: Any, tensor: Tensor) -> None:
        key = waits.next_key(self.comm.number, _CHANNEL)
        Work(work, key, "runs a layer's collective in its tensor-parallel group", tensor).wait()


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
    if axis.watched is not None:
        axis.watched.wholes.note_part(found, value)
    return found


def leave(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return the sum of the parts' values."""
    found: Tensor = _Leave.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.watched is not None:
        axis.watched.wholes.note_whole(found)
    return found


def join(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return the parts' values, joined along the last dimension."""
    found: Tensor = _Join.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.watched is not None:
        axis.watched.wholes.note_whole(found)
    return found


def split(value: Tensor, axis: TensorAxis) -> Tensor:
    """Return this rank's part of the last dimension of a value that all ranks have."""
    found: Tensor = _Split.apply(value, axis)  # type: ignore[no-untyped-call]  # torch does not type it
    if axis.watched is not None:
        axis.watched.wholes.note_part(found, value)
    return found
