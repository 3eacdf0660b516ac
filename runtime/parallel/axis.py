"""Defines the axes of ranks that share layers, experts or sequences, and what autograd does between parts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.axis import Axis
from ..comm.collectives import Comm
from ..comm.pending import Work, waits
from ..comm.process_group import open_comms, running_comm
from ..errors import ParameterError
from ..mesh import own_group
from ..zero import placeholder

# -- own numbers ------------------------------------------------------------------------------------
#
# Gives ranks that share layers different random numbers where they have different activations.


class OwnNumbers:
    """Seeds the generators of the CPU and the device with a seed of this rank's own between a layer that is
    cut by columns and the next that is cut by rows, so that dropout drops other places of other heads.

    The seed is drawn from the state that all ranks of the axis have, which goes on afterwards: a
    recomputation from that state draws the same.
    """

    def __init__(self, position: int, device: torch.device) -> None:
        self._position = position
        self._device = device
        self._seed = 0
        self._outside: list[torch.Tensor] | None = None

    def open(self) -> None:
        """Begin with the own numbers, unless they have begun."""
        if self._is_inside():
            return
        self._seed = int(torch.randint(1 << 62, ())) + self._position
        self._outside = [torch.get_rng_state()]
        torch.default_generator.manual_seed(self._seed)
        if self._device.type == "cuda":
            self._outside.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.manual_seed(self._seed)  # of the current device, which is this one

    def close(self) -> None:
        """Go on with the numbers of all ranks, if the own ones have begun."""
        if self._is_inside() and self._outside is not None:
            torch.set_rng_state(self._outside[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._outside[1], self._device)
        self._outside = None

    def _is_inside(self) -> bool:
        """Tell whether the own numbers are drawn now: a recomputation that ended early, or an exception, may
        have left without :meth:`close`, and somebody else has restored the state.
        """
        return self._outside is not None and torch.default_generator.initial_seed() == self._seed


# -- axis -------------------------------------------------------------------------------------------


_TENSOR = "tensor"
_TENSOR_CHECKS = "tensor checks"
_TENSOR_STATES = "tensor states"


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
        key = waits.next_key(self.comm.number, _TENSOR_CHECKS)
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
        key = waits.next_key(self.comm.number, _TENSOR_STATES)
        Work(work, key, "all-gathers a parameter over its tensor-parallel group", part).wait()
        return parts

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the last dimension."""
        width = whole.shape[-1] // self.size
        return whole.narrow(-1, self.position * width, width).contiguous()

    def _wait(self, work: Any, tensor: Tensor) -> None:
        key = waits.next_key(self.comm.number, _TENSOR)
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


# -- axis -------------------------------------------------------------------------------------------
#
# Defines the ranks that have different experts, and exchanges rows of tokens between them.


_EXPERT = "expert"
_EXPERT_STATES = "expert states"


class ExpertAxis(Axis):
    """Runs the collectives of the ranks that have different experts and different samples.

    ``comm.moved["expert"]`` counts the elements that this rank sends, those to itself included.
    """

    name = "expert"

    def __init__(self, comm: Comm) -> None:
        """Find this rank's place; :meth:`open` makes the process groups."""
        super().__init__(comm)
        assert comm.experts is not None
        self.mesh = comm.mesh
        self.size = self.mesh.expert
        self.place = self.mesh.coordinates(comm.rank)["expert"]
        self.position = self.place * self.mesh.tensor + comm.rank % self.mesh.tensor
        """This rank's place among the ranks that have all experts together, in parts."""

    def open(self) -> None:
        """Make the process groups. Collective for all ranks."""
        self.keep_group("passes", own_group(self.comm, "expert"))
        # a state that one rank alone asks for must not meet the tokens of others
        self.keep_group("states", own_group(self.comm, "expert", "tensor"))

    def gather_state(self, part: Tensor) -> list[Tensor]:
        """Return a parameter's parts of the ranks that have all experts together; ``part`` is contiguous."""
        parts = [torch.empty_like(part) for _ in range(self.size * self.mesh.tensor)]
        work = dist.all_gather(parts, part, group=self.group_for("states"), async_op=True)
        key = waits.next_key(self.comm.number, _EXPERT_STATES)
        Work(work, key, "all-gathers a parameter over its expert-parallel group", part).wait()
        return parts

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive rows to each rank of the axis, so many; return those that the ranks have sent."""
        rows = rows.contiguous()
        self.comm._count("expert", rows.numel())
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(
            found, rows, list(received), list(sent), group=self.group, async_op=True
        )
        self._wait(work, found)
        return found

    def _wait(self, work: Any, tensor: Tensor) -> None:
        key = waits.next_key(self.comm.number, _EXPERT)
        Work(work, key, "exchanges tokens in its expert-parallel group", tensor).wait()


class _ExchangeRows(torch.autograd.Function):
    """Exchanges rows of several tensors, and their gradients on the way back, always in one order."""

    @staticmethod
    def forward(
        ctx: Any, axis: ExpertAxis, sent: Sequence[int], received: Sequence[int], *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.sent = sent
        ctx.received = received
        return tuple(axis.exchange(each, sent, received) for each in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = exchange_rows(ctx.axis, ctx.received, ctx.sent, *gradients)
        needed = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *(each if wanted else None for each, wanted in zip(back, needed, strict=True)),
        )


def exchange_rows(
    axis: ExpertAxis, sent: Sequence[int], received: Sequence[int], *rows: Tensor
) -> tuple[Tensor, ...]:
    """Send consecutive rows of each tensor to the ranks of an axis; return what they have sent."""
    found: tuple[Tensor, ...] = _ExchangeRows.apply(axis, sent, received, *rows)  # type: ignore[no-untyped-call]  # torch does not type it
    return found


# -- axis -------------------------------------------------------------------------------------------
#
# Defines the ranks that have different parts of each sequence, and what they exchange.


_SEQUENCE = "sequence"


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
        self.comm._count(_SEQUENCE, part.numel() * self.size)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(dist.all_gather(parts, part, group=self.group, async_op=True), part, "all-gathers")
        return torch.cat(parts, dim)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor in place over the axis; return it."""
        self.comm._count(_SEQUENCE, 2 * tensor.numel())
        self._wait(dist.all_reduce(tensor, group=self.group, async_op=True), tensor, "sums the losses of")
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Replace each element by the largest of the axis, in place; return it. It serves checks alone."""
        self.comm._count(f"{_SEQUENCE} checks", 2 * tensor.numel())
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._wait(work, tensor, "compares batches of")
        return tensor

    def exchange(self, tensors: Sequence[Tensor], cut: int, joined: int) -> list[Tensor]:
        """Send each rank its part of ``tensors`` along the dimension ``cut``; return what the ranks have
        sent, joined along the dimension ``joined``. One collective for all, of one dtype.
        """
        size = self.size
        pieces = []
        for each in tensors:
            shape = list(each.shape)
            shape[cut : cut + 1] = [size, shape[cut] // size]
            pieces.append(each.view(shape).movedim(cut, 0))
        sent = torch.cat([piece.reshape(size, -1) for piece in pieces], 1)
        self.comm._count(_SEQUENCE, sent.numel())
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
        key = waits.next_key(self.comm.number, f"{_SEQUENCE}: {what}")
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


class _ExchangeTokens(torch.autograd.Function):
    """Exchanges parts of several tensors, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, axis: SequenceAxis, cut: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.cut = cut
        ctx.joined = joined
        return tuple(axis.exchange([each.contiguous() for each in tensors], cut, joined))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *exchange_tokens(ctx.axis, ctx.joined, ctx.cut, *gradients)


def exchange_tokens(axis: SequenceAxis, cut: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cut tensors along one dimension and join them along another, over the ranks of an axis."""
    found: tuple[Tensor, ...] = _ExchangeTokens.apply(axis, cut, joined, *tensors)  # type: ignore[no-untyped-call]  # torch does not type it
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
