"""Reduces the gradients that autograd makes to each rank's summed shard of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import DONE, Pending
from ..device import named
from .placeholder import GRADIENTS, VALUES
from .store import ShardStore
from .unit import Unit

# -- bucket -----------------------------------------------------------------------------------------
#
# Collects the gradients of one unit until they are sent.


class BucketState(IntEnum):
    """Says what a bucket holds of the present step."""

    EMPTY = auto()
    """Means that no gradient has come."""
    COLLECTING = auto()
    """Means that local gradients are added up, and that none has been sent."""
    REDUCED = auto()
    """Means that everything has been sent; a persistent bucket's own part becomes the sum over the ranks."""
    COLLECTING_AGAIN = auto()
    """Means that local gradients are added up, and that earlier ones have been sent."""


_ALLOWED = {
    BucketState.EMPTY: {BucketState.COLLECTING},
    BucketState.COLLECTING: {BucketState.REDUCED},
    BucketState.REDUCED: {BucketState.COLLECTING_AGAIN},
    BucketState.COLLECTING_AGAIN: {BucketState.REDUCED},
}
"""Lists the states that may follow each; every one may become EMPTY, at the end of a step."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Collects the gradients of one unit.

    ``tensor`` is flat with ``unit.numel`` elements. With persistent buckets (stages 0 and 1) it is fp32,
    local sums of the micro-batches stay in it, and this rank's part is the gradient. A transient one is lent
    from a pool, in the dtype that is sent, from a unit's first gradient until its reduction.
    """

    unit: Unit
    state: BucketState = BucketState.EMPTY
    is_collecting: bool = False
    """Whether the bucket holds unreduced gradients. Cached because every gradient reads it."""
    order: int = 0
    tensor: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    """Tells which parameters' slices hold a gradient (and are added to); the others are uninitialized."""
    seen: list[bool] = field(default_factory=list)
    """Tells which parameters had a gradient since this backward pass began or the unit was last complete."""
    missing: int = 0
    carry: Tensor | None = None
    """Persistent: sums of an earlier backward pass of the same step, to be added to the next."""
    used: list[bool] = field(default_factory=list)
    """Tells which parameters had a gradient in the current step."""
    _places: list[tuple[torch.Size, tuple[int, ...], int]] = field(init=False)
    """Holds the shape, strides and offset of each view: one call makes it."""

    def __post_init__(self) -> None:
        slots = zip(self.unit.shapes, self.unit.layout.slots, strict=True)
        self._places = [
            (shape, torch.empty(shape, device="meta").stride(), slot.offset) for shape, slot in slots
        ]

    @property
    def is_complete(self) -> bool:
        """Tell whether every parameter that is stepped has had a gradient on this rank."""
        slots = self.unit.layout.slots
        return all(used or slot.group < 0 for used, slot in zip(self.used, slots, strict=True))

    @property
    def store(self) -> ShardStore:
        """Return the store of the unit, which is trained."""
        assert self.unit.store is not None
        return self.unit.store

    @property
    def own(self) -> Tensor:
        """Return this rank's part of a persistent bucket."""
        assert self.tensor is not None
        return self.tensor[self.unit.start : self.unit.stop]

    def move(self, to: BucketState) -> None:
        assert to in _ALLOWED[self.state], f"bucket {self.unit.name}: {self.state.name} -> {to.name}"
        self._set(to)

    def empty(self) -> None:
        """Begin a step, with no gradient."""
        self._set(BucketState.EMPTY)

    def _set(self, state: BucketState) -> None:
        self.state = state
        self.is_collecting = state in (BucketState.COLLECTING, BucketState.COLLECTING_AGAIN)

    def await_all(self) -> None:
        """Note that every parameter's gradient is to come (once more), but for those without elements, which
        another stage of a pipeline has.
        """
        self.seen = list(self.unit.without_elements)
        self.missing = self.seen.count(False)

    def set_tensor(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self.views = []
        self.written = [False] * len(self.unit.parameters)
        if tensor is not None:
            start = tensor.storage_offset()
            self.views = [
                tensor.as_strided(shape, strides, start + offset) for shape, strides, offset in self._places
            ]


# -- buffer pool ------------------------------------------------------------------------------------
#
# Lends the memory that gradients are sent from.


class BufferPool:
    """Keeps send buffers, of ordinary memory no more than are in use at one time: where all are too small, a
    larger one takes the place of the smallest. They are released after each pass. Shared memory cannot be.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.free: list[Tensor] = []

    def lend(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a flat tensor of ``numel`` elements, part of the smallest free buffer large enough."""
        fitting = [i for i, t in enumerate(self.free) if t.dtype == dtype and t.numel() >= numel]
        if not fitting:
            alike = [i for i, t in enumerate(self.free) if t.dtype == dtype]
            if alike and not self._comm.shared:
                del self.free[min(alike, key=lambda i: self.free[i].numel())]
            return self._comm.empty(numel, dtype)
        return self.free.pop(min(fitting, key=lambda i: self.free[i].numel()))[:numel]

    def give_back(self, tensor: Tensor) -> None:
        self.free.append(tensor if tensor._base is None else tensor._base)

    def end_pass(self) -> None:
        if not self._comm.shared:
            self.free.clear()


# -- reduce -----------------------------------------------------------------------------------------


MAX_IN_FLIGHT = 2
"""Limits the reductions under way at once; each holds its bucket and a receive buffer of equal size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """Sets how gradients are sent and summed."""

    transient: bool
    """Stages 2 and 3: a bucket lives only until its reduction; each micro-batch is reduced."""
    dtype: torch.dtype | None
    """Selects the dtype that is sent; None is the parameters' dtype."""
    single: torch.dtype | None = None
    """dtype that stores a step's first gradient (None: fp32, or float64 for a float64 model)."""
    keeps_reduced: bool = False
    """Leaves a step's first gradient on the device in the dtype of the sum over the ranks: wider memory would
    hold no more digits of it.
    """
    sums: torch.dtype | None = None
    """dtype that accumulates the gradients of several backward passes (None: as above)."""
    predivide: float = 1.0
    """Divides gradients before the reduction, to keep fp16 sums in range; ``Averaging`` undoes it."""


@dataclass(slots=True, eq=False)
class _Reduction:
    """Describes a reduction under way."""

    pending: Pending
    bucket: Bucket
    lent: Tensor | None
    """Holds the buffer that goes back to the pool afterwards, if one was lent."""
    shard: Tensor
    """Receives the sum: the unit's gradient, or a tensor that is added to that afterwards."""
    first: bool
    """Tells that it is the first of its unit in this step: it replaces what was there."""


class GradientConsumer:
    """Uses the gradients of a backward pass as they arrive: a way to step units. This class leaves them in
    the stores until the step.
    """

    wants_each_sum = False
    """Tells that it takes each sum before the next reduction begins."""

    def before_pass(self, reducer: GradientReducer) -> None:
        """Prepare a backward pass. Raises OptimizerError if the step cannot have one more."""

    def before_another_gradient(self, unit: Unit) -> None:
        """Raise OptimizerError if a unit cannot have a gradient after its reduction in the same step."""

    def before_reduction(self, bucket: Bucket) -> None:
        """Take note that a unit is used no more in this pass on this rank, and that its reduction begins."""

    def take(self, bucket: Bucket) -> None:
        """Take a unit's sum, which is in its store."""

    def end_pass(self) -> None:
        """Take note that all sums of a pass have arrived."""

    def check_droppable(self) -> None:
        """Raise OptimizerError if gradients have been used that are to be dropped."""

    def keeps_gradients(self) -> bool:
        """Tell whether an error is ending the step, and what has arrived stays as it is."""
        return False

    def drop_gradients(self) -> None:
        """Begin a new step."""


class GradientReducer:
    """Collects gradients by unit and reduces each unit as soon as it is complete.

    Note [One order]. Ranks may finish their units in different orders (a skipped branch, a race), but
    collectives must be issued in one. Reductions are therefore launched in ``order``: reverse registration at
    first, then the order in which rank 0 completed the units in the first pass. A complete unit waits for
    those before it. Units that are incomplete at the end of the pass (unused parameters) follow then, with
    zeros for missing gradients.

    Nothing enforces the order of gathers: all ranks must use the same modules in the same order. ``Order`` in
    comm/collectives.py detects a difference at the next step. Prefetches keep that order, too: see
    Note [Prefetch keeps the order] in hooks.py. Gathers and reductions need no common order: see Note [Two
    channels] in comm/link.py.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm, options: GradientOptions) -> None:
        self.comm = comm
        self.options = options
        self.consumer = GradientConsumer()
        """Gets each unit's reduced gradients. ``ShardedOptimizer`` sets it to its ``StepMethod``."""
        self.sync = True
        """Tells whether this backward pass reduces. Only persistent buckets may leave it for later."""
        self.skips_reduction = False
        """Leaves gradients unreduced, because the optimizer exchanges something else. Set by
        ``optim/one_bit.py``. Persistent buckets only.
        """
        self.passes = 0
        """Counts backward passes since the last step."""
        self.dropped = 0
        """Counts those whose gradients the script has dropped since then."""
        self.is_empty_pass = True
        """Tells that no gradient has arrived since the pass began."""
        self._buckets: dict[int, Bucket] = {}
        self._order: list[Bucket] = []
        self._unsent = False
        """Tells that a backward pass without a reduction has left gradients behind."""
        self._finished: list[Bucket] = []
        self._agreed = False
        self._ready: set[int] = set()
        self._next = 0
        self._in_flight: deque[_Reduction] = deque()
        self._pool = BufferPool(comm)
        self.set_units(units)

    def set_units(self, units: Sequence[Unit]) -> None:
        """Set the units whose gradients are collected; gradients of those that stay are kept. Between two
        passes.
        """
        kept = self._buckets
        self._buckets = {id(unit): kept.get(id(unit)) or Bucket(unit) for unit in units}
        self._order = list(reversed(self._buckets.values()))
        self._agreed = self.comm.world_size == 1
        for key, bucket in self._buckets.items():
            if key not in kept:
                bucket.unit.gradients = self
                self._clear_bucket(bucket)

    def has(self, unit: object, index: int) -> bool:
        """Tell whether this rank has taken a gradient of parameter ``index`` since the last step."""
        bucket = self._buckets.get(id(unit))
        return bucket is not None and bucket.used[index]

    def awaits(self, unit: object) -> bool:
        """Tell whether a gradient of the unit is still to come in this backward pass."""
        bucket = self._buckets.get(id(unit))
        return bucket is not None and bucket.missing > 0

    @property
    def _gradients_are_local(self) -> bool:
        """Return whether persistent buckets stay unreduced: they keep this rank's sum."""
        return self.skips_reduction or self.comm.world_size == 1

    @property
    def predivides(self) -> bool:
        """Return whether gradients are divided before the reduction. Unreduced buckets may complete several
        times in a step, so they are not divided.
        """
        return self.options.predivide != 1.0 and not self._gradients_are_local

    def whole_gradient(self, unit: Unit) -> Tensor:
        """Return a unit's persistent bucket: with :attr:`skips_reduction`, unreduced gradients."""
        tensor = self._buckets[id(unit)].tensor
        assert tensor is not None
        return tensor

    def widen(self, unit: Unit) -> None:
        """Let a unit's gradient, if it is on the device, rest in the dtype of sums: a value that a script
        writes may have more digits than the reduced one. Between two passes.
        """
        bucket = self._buckets[id(unit)]
        store = bucket.store
        if not store.on_device:
            return
        grad = store.grad()
        dtype = self._accumulation_dtype(bucket, single=False)
        if torch.promote_types(grad.dtype, dtype) == grad.dtype:
            return
        if self.options.transient:
            store.grad_memory = grad.to(dtype)
        else:
            self._make_room(bucket, dtype)
            store.grad_memory = bucket.own

    def forget(self, unit: object, index: int) -> None:
        """Drop the gradient of one parameter. Between two passes. Raises RuntimeError where it is on disk,
        OptimizerError where it may have been used.
        """
        self.consumer.check_droppable()
        bucket = self._buckets[id(unit)]
        if not bucket.used[index]:
            return
        unit = bucket.unit
        slot = unit.layout.slots[index]
        if bucket.tensor is not None:
            bucket.tensor[slot.offset : slot.stop].zero_()
        for shard in (bucket.carry, bucket.store.grad() if bucket.store.has_grad else None):
            if shard is not None:
                low = max(slot.offset, unit.start)
                high = min(slot.stop, unit.stop)
                if low < high:
                    shard[low - unit.start : high - unit.start].zero_()
        if bucket.store.has_grad:
            bucket.store.grad_changed()
        bucket.written[index] = bucket.used[index] = False

    def drop(self) -> None:
        """Drop what the script's backward passes have accumulated. Raises OptimizerError as :meth:`clear`."""
        dropped = self.dropped + self.passes
        self.clear()
        self.dropped = dropped

    def clear(self) -> None:
        """Begin a new optimizer step, with nothing accumulated. Raises OptimizerError if the present one is
        half done.

        What a backward pass that ended in an exception has left under way is finished and dropped.
        """
        if self.consumer.keeps_gradients():
            return
        self.consumer.check_droppable()
        while self._in_flight:
            left = self._in_flight.popleft()
            left.pending.wait()
            if left.lent is not None:
                self._pool.give_back(left.lent)
        for bucket in self._buckets.values():
            if self.options.transient and bucket.tensor is not None:
                self._pool.give_back(bucket.tensor)
                bucket.set_tensor(None)
        self.passes = 0
        self.dropped = 0
        self._unsent = False
        for bucket in self._buckets.values():
            self._clear_bucket(bucket)
        self.consumer.drop_gradients()

    @staticmethod
    def _clear_bucket(bucket: Bucket) -> None:
        bucket.empty()
        bucket.carry = None
        bucket.store.drop_grad()
        bucket.written = [False] * len(bucket.unit.parameters)
        bucket.used = [False] * len(bucket.unit.parameters)
        bucket.await_all()

    def used(self) -> list[bool]:
        """Return a flag for each parameter of each unit: whether it had a gradient in this step."""
        return [flag for bucket in self._buckets.values() for flag in bucket.used]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the memory that gradients are collected in."""
        for bucket in self._buckets.values():
            for tensor in (bucket.tensor, bucket.carry, *bucket.views):
                if tensor is not None:
                    yield tensor
            if bucket.store.grad_memory is not None:
                yield bucket.store.grad_memory

    def release_buffers(self) -> None:
        """Release the memory of the send buffers; it comes back when it is written."""
        for buffer in self._pool.free:
            self.comm.release(buffer.untyped_storage())

    @property
    def has_order(self) -> bool:
        """Tell whether all ranks have agreed on the order of reductions."""
        return self._agreed

    @property
    def is_busy(self) -> bool:
        """Tell whether gradients are being collected or reduced."""
        lent = any(bucket.tensor is not None for bucket in self._buckets.values())
        return bool(self._in_flight) or (self.options.transient and lent)

    def begin(self) -> None:
        """Begin a backward pass. Raises OptimizerError if the step cannot have one more."""
        self.consumer.before_pass(self)
        for bucket in self._buckets.values():
            bucket.unit.check_on_device(VALUES, GRADIENTS)
            bucket.await_all()
        self.passes += 1
        self.is_empty_pass = True
        self._ready.clear()
        self._next = 0
        for position, bucket in enumerate(self._order):
            bucket.order = position

    def add(self, unit: Unit, index: int, grad: Tensor) -> bool:
        """Add the gradient of a unit's parameter ``index``; return True when that completes the unit."""
        bucket = self._buckets[id(unit)]
        self.is_empty_pass = False
        if not bucket.is_collecting:
            self._open(bucket)
        view = bucket.views[index]
        if bucket.written[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
            bucket.written[index] = bucket.used[index] = True
        if not bucket.seen[index]:
            bucket.seen[index] = True
            bucket.missing -= 1
            if bucket.missing == 0:
                if self.sync:
                    self._complete(bucket)
                return True
        return False

    def _open(self, bucket: Bucket) -> None:
        """Prepare a bucket for local gradients. What it has reduced in this step is saved first."""
        unit = bucket.unit
        if bucket.state is BucketState.REDUCED:
            self.consumer.before_another_gradient(unit)
        if self.options.transient:
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                self._retire()
            tensor = self._pool.lend(self.options.dtype or unit.dtype, unit.numel)
            for start, stop in unit.layout.gaps():
                tensor[start:stop].zero_()
            bucket.set_tensor(tensor)
        else:
            again = bucket.state is BucketState.REDUCED
            while again and any(reduction.bucket is bucket for reduction in self._in_flight):
                self._retire()
            self._make_room(bucket, self._accumulation_dtype(bucket, self.sync and not again))
            bucket.store.before_gradient()
            if again and not self._gradients_are_local:
                bucket.carry = bucket.own.clone()
                bucket.written = [False] * len(bucket.written)
        is_first = bucket.state is BucketState.EMPTY
        bucket.move(BucketState.COLLECTING if is_first else BucketState.COLLECTING_AGAIN)

    def _accumulation_dtype(self, bucket: Bucket, single: bool) -> torch.dtype:
        """Return the dtype that stores a unit's gradient: a single one, or the sum of several passes."""
        unit = bucket.unit
        if single and self.options.keeps_reduced and bucket.store.on_device and not self.skips_reduction:
            return unit.link.reduced_dtype(self.options.dtype or unit.dtype)
        chosen = self.options.single if single else self.options.sums
        return chosen or torch.promote_types(unit.dtype, torch.float32)

    def _make_room(self, bucket: Bucket, dtype: torch.dtype) -> None:
        """Give a persistent bucket memory that holds ``dtype``; what it has stays in it."""
        former = bucket.tensor
        if former is None or torch.promote_types(former.dtype, dtype) != former.dtype:
            made = self.comm.empty(bucket.unit.numel, dtype)
            bucket.set_tensor(made.zero_() if former is None else made.copy_(former))

    def _complete(self, bucket: Bucket) -> None:
        if bucket.order in self._ready:  # complete a second time: its sums follow at the end of the pass
            bucket.await_all()
            return
        self._finished.append(bucket)
        self._ready.add(bucket.order)
        while self._next < len(self._order):
            following = self._order[self._next]
            # Units of a pipeline's other stages have nothing here, and never get a gradient.
            if self._next not in self._ready and following.missing:
                return
            self._launch(following)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        self.consumer.before_reduction(bucket)
        if not bucket.is_collecting:
            self._open(bucket)
        assert bucket.tensor is not None
        for view, written in zip(bucket.views, bucket.written, strict=True):
            if not written:
                view.zero_()
        bucket.await_all()
        if self.predivides:
            bucket.tensor.mul_(1.0 / self.options.predivide)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._retire()
        reduce = self._reduce_transient if self.options.transient else self._reduce_persistent
        with named(f"reduce {bucket.unit.name}"):
            self._in_flight.append(reduce(bucket))
        if self.options.transient:
            bucket.set_tensor(None)
        bucket.move(BucketState.REDUCED)
        # In the order of the launches, which is that of all ranks: taking a sum may be collective.
        while self._in_flight and self.consumer.wants_each_sum:
            self._retire()

    def _reduce_transient(self, bucket: Bucket) -> _Reduction:
        unit = bucket.unit
        sent = bucket.tensor
        first = bucket.state is BucketState.COLLECTING
        assert sent is not None
        dtype = unit.link.reduced_dtype(sent.dtype)
        accumulation = self._accumulation_dtype(bucket, first)
        alone = self.comm.world_size == 1 and first and bucket.store.on_device
        # The bucket itself is the sum, unless it is a part of larger memory, which the unit would keep whole.
        if alone and sent.dtype == accumulation and sent.nbytes == sent.untyped_storage().nbytes():
            return _Reduction(DONE, bucket, None, sent, first)
        shard = bucket.store.room_for_grad(first, dtype, accumulation)
        return _Reduction(self.comm.reduce_scatter(shard, sent, unit.tag), bucket, sent, shard, first)

    def _reduce_persistent(self, bucket: Bucket) -> _Reduction:
        unit = bucket.unit
        assert bucket.tensor is not None
        if self._gradients_are_local:
            return _Reduction(DONE, bucket, None, bucket.own, True)
        # the sum of several passes has more digits than one gradient: rounding it would lose them
        own = unit.dtype if self.passes <= 1 else bucket.tensor.dtype
        dtype = self.options.dtype or own
        narrow = None
        if bucket.tensor.dtype != dtype:
            narrow = self._pool.lend(dtype, unit.numel).copy_(bucket.tensor)
        wide = bucket.tensor
        send = bucket.tensor if narrow is None else narrow
        if unit.stop - unit.start < unit.numel:
            pending = self.comm.reduce_scatter(bucket.own, send, unit.tag)
        else:
            pending = self.comm.all_reduce(send, unit.tag)
            if narrow is not None:
                pending = pending.then(lambda: wide.copy_(send))
        return _Reduction(pending, bucket, narrow, bucket.own, True)

    def _retire(self) -> None:
        done = self._in_flight.popleft()
        done.pending.wait()
        if done.lent is not None:
            self._pool.give_back(done.lent)
        bucket = done.bucket
        if bucket.carry is not None:
            done.shard.add_(bucket.carry)
            bucket.carry = None
        # Only what was lent is used again: the gradient may stay in all other memory.
        bucket.store.add_grad(
            done.shard, first=done.first, stays=done.lent is None or not self.options.transient
        )
        self.consumer.take(bucket)

    def finish(self) -> None:
        """End the backward pass: reduce what is incomplete or came twice, and wait for every reduction."""
        if self.sync:
            self._reduce_all()
        else:
            self._unsent = True
        self._pool.end_pass()
        self.consumer.end_pass()

    def reduce_rest(self) -> None:
        """Reduce what passes without a reduction have left, if the last one was such a pass. Collective."""
        if self._unsent:
            self._reduce_all()
            self._pool.end_pass()

    def _reduce_all(self) -> None:
        self._unsent = False
        for bucket in self._order[self._next :]:
            self._launch(bucket)
        self._next = len(self._order)
        for bucket in self._order:
            if bucket.is_collecting:
                self._launch(bucket)
        while self._in_flight:
            self._retire()
        self._broadcast_launch_order()

    def _broadcast_launch_order(self) -> None:
        if self._agreed:
            self._finished.clear()
            return
        self._agreed = True
        positions = {id(bucket): i for i, bucket in enumerate(self._buckets.values())}
        done = [positions[id(bucket)] for bucket in dict.fromkeys(self._finished)]
        self._finished.clear()
        mine = done + [i for i in reversed(range(len(positions))) if i not in set(done)]
        order = torch.tensor(mine, dtype=torch.int64, device=self.comm.device)
        self.comm.broadcast(order)
        buckets = list(self._buckets.values())
        self._order = [buckets[i] for i in order.tolist()]
