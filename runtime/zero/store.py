"""Keeps what a rank has of a unit between its uses.

A unit's :class:`ValueStore` has what gathers send: this rank's values in the compute dtype. A trained unit
also has a :class:`ShardStore`: what the optimizer updates (master values, gradient, and on disk its state),
in tiles. The stores here are on the compute device; others implement the protocols elsewhere, and a
:class:`StoreFactory` decides for each unit.

Note [New values]. What gathers send may be a copy of the master values, in another dtype or memory. New
values reach it in one way only: ``ValueStore.write``, which ``OpenTile.publish`` calls for a tile. Code that
changes masters without it trains on stale values, and nothing raises an error. So a step off the device, a
save, a load and access to single parameters are all loops over ``open_tiles``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...cuda_ops.norm import sums_of_squares
from ..comm.collectives import Comm
from ..comm.pending import DONE, Pending
from .layout import Range

if TYPE_CHECKING:
    from .unit import Unit

T = TypeVar("T")


class Access(Enum):
    """Says what a tile is opened for."""

    READ = auto()
    """To read the master values and the state."""
    REPLACE = auto()
    """To replace the master values without reading them."""
    MASTER = auto()
    """To change the master values."""
    WRITE = auto()
    """To change the master values and the state."""
    STEP = auto()
    """To update the master values and the state by the gradient."""


@dataclass(slots=True)
class TileView:
    """Shows elements ``start`` to ``stop`` of a shard, as flat tensors of that length in one memory."""

    start: int
    stop: int
    master: Tensor
    grad: Tensor | None = None
    """Holds the summed gradient, for a step."""
    out: Tensor | None = None
    """Receives, in a step, the updated values in the compute dtype; None where the master itself is read."""
    state: Sequence[Tensor] = ()
    """On disk: the optimizer's state, one tensor after the other. Elsewhere the optimizer has it."""


_beside: dict[torch.device, torch.cuda.Stream] = {}
"""Holds each device's stream for gathers that begin at a mark."""


@dataclass(frozen=True, slots=True)
class SettledValues:
    """Marks where, in the work that a stream has been given, values were written."""

    device: torch.device
    stream: torch.cuda.Stream
    written: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> SettledValues:
        """Mark the current stream of a GPU."""
        stream = torch.cuda.current_stream(device)
        return cls(device, stream, stream.record_event())

    @property
    def is_of_current_stream(self) -> bool:
        """Tell whether the current stream is the one that was marked."""
        return torch.cuda.current_stream(self.device) == self.stream

    def behind(self) -> AbstractContextManager[Any]:
        """Return a context whose work begins behind the mark, whatever the stream has been given since. The
        stream that uses the results has to wait for them.
        """
        stream = _beside.get(self.device)
        if stream is None:
            stream = _beside[self.device] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's own
        stream.wait_event(self.written)
        return torch.cuda.stream(stream)


class ValueStore(ABC):
    """Keeps this rank's values of a unit in the compute dtype (or the master's, where that is read)."""

    blocks_ahead = 1
    """Sets how many blocks to gather ahead at least, so that their transfers overlap."""
    is_gathered_directly = True
    """Tells whether a gather needs nothing except the other ranks."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        """Holds the values, flat, where they are in memory; call :meth:`flush` before reading them."""
        self.settled: SettledValues | None = None
        """Marks where a step has written the values and allocated the memory of the next gather, which may
        begin there: see Note [Gathers beside the step] in optim/step.py. None: behind the present stream.
        """

    def start_gather(self, unit: Unit) -> Pending:
        """Start to fill a unit. Raises DiskError."""
        assert self.tensor is not None
        return unit.gather_from(self.tensor)

    def make_room(self, unit: Unit) -> None:
        """Allocate what a gather that has been started needs of the device's memory, before the block in
        front of the unit's is queued there.
        """

    @abstractmethod
    def write(self, start: int, values: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        """Replace elements from ``start`` on by flat ``values`` of any dtype and memory, not before
        ``after``. While they travel to a device, ``values`` must not change until the result is synchronized.
        Raises DiskError of an earlier write.
        """

    def flush(self) -> None:
        """Wait until what was written is in the store. Raises DiskError."""

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        """Yield the values, flat, inside the context. Raises DiskError."""
        assert self.tensor is not None
        self.flush()
        yield self.tensor

    def release(self) -> None:
        """Release the memory."""


class OpenTile:
    """Shows a tile of a shard while it is used. This base class is for memory: nothing is read or written."""

    def __init__(self, values: ValueStore, view: TileView) -> None:
        self._values = values
        self._view = view

    def wait(self) -> TileView:
        """Return the tile's content once it is in memory. Raises DiskError."""
        return self._view

    def publish(self, after: torch.cuda.Event | None = None) -> Pending:
        """Write the new values (``out``, or else the master) to where gathers read, not before ``after``."""
        view = self.wait()
        return self._values.write(view.start, view.master if view.out is None else view.out, after)

    def close(self) -> None:
        """Write the tile back, if it was opened for writing."""

    def abandon(self) -> None:
        """Close without writing."""


class ShardStore(ABC):
    """Keeps what this rank updates of a unit."""

    on_device = False
    """Tells whether master values and gradient are on the compute device."""
    grad_memory: Tensor | None = None
    """Holds the gradient on the device, where it stays there from step to step."""
    state_room: int | None = None
    """On disk: how many tensors of optimizer state there is room for; None where the optimizer has them."""

    def __init__(
        self, master: Tensor | None, values: ValueStore, cuts: Sequence[Range], tiles: Sequence[Range]
    ) -> None:
        self.master = master
        """Holds the master values, flat, where they are in memory."""
        self.values = values
        self.cuts = cuts
        """Lists the ranges whose squares are summed: equal wherever the gradient is, for equal norms."""
        self.tiles = tiles
        self.has_grad = False
        """Tells whether a gradient of the present step has been reduced into it."""
        self.reader: Pending = DONE
        """Keeps a background step that still reads the gradient."""

    @property
    def compute_copy(self) -> Tensor | None:
        """Return the values kept in another dtype than the master's, if there are any on the device."""
        return None

    def publish(self, *, copy_is_new: bool) -> None:
        """Write new master values to where gathers read, unless the step has written :attr:`compute_copy` and
        ``copy_is_new``. Off the device each tile is published when it is stepped, and this does nothing.
        """

    @property
    def has_room(self) -> bool:
        """Tell whether ``open`` would not wait for another tile."""
        return False

    @abstractmethod
    def open(self, tile: Range, access: Access) -> OpenTile:
        """Begin to bring a tile into memory. Raises DiskError of an earlier write."""

    def drain(self) -> None:
        """Wait until all tiles that were closed are written. Raises DiskError."""

    @abstractmethod
    def room_for_grad(self, first: bool, dtype: torch.dtype, accumulation_dtype: torch.dtype) -> Tensor:
        """Return a flat buffer of the shard's size for a reduction result, in ``dtype`` or
        ``accumulation_dtype``. Pass it to :meth:`add_grad` afterwards.
        """

    @abstractmethod
    def add_grad(self, shard: Tensor, *, first: bool, stays: bool) -> None:
        """Add a reduced gradient: the ``first`` of a step replaces what was there, others are added. With
        ``stays`` the caller leaves it untouched until the step, so that it need not be copied.
        """

    def before_gradient(self) -> None:
        """Let the device write where the last gradient was, in memory that a bucket keeps."""

    def drop_grad(self) -> None:
        """Begin a new step, without a gradient; its memory is reused."""
        self.has_grad = False

    def grad_squares(self) -> list[Tensor]:
        """Sum the squares of the gradient's :attr:`cuts`: 0-dim float64 each."""
        return squares_of(self.grad_parts())

    def grad_parts(self) -> list[Tensor]:
        """Return the parts of the gradient whose squares are summed. Raises as :meth:`grad`."""
        grad = self.grad()
        if self.cuts == [(0, grad.numel())]:
            return [grad]
        return [grad[start:stop] for start, stop in self.cuts]

    @abstractmethod
    def grad(self) -> Tensor:
        """Return the gradient, flat. Raises RuntimeError where it is on disk."""

    def grad_changed(self) -> None:
        """Note that the caller has changed what :meth:`grad` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """Describes the shard that stores are made for."""

    dtype: torch.dtype
    """Names the compute dtype of the model."""
    comm: Comm
    trainable: bool
    in_unit: Tensor | None
    """Holds this rank's part of the flat buffer, where that stays whole; None where it is sharded."""
    cuts: Sequence[Range]
    is_new: bool
    """Tells that its parameters were unfrozen in the middle of a run."""
    numel: int
    """Counts the elements of all ranks, without padding."""
    narrow_masters: bool = False
    """Tells that the master values have the compute dtype, and are rounded at random."""

    @property
    def master_dtype(self) -> torch.dtype:
        """Return the dtype of master values: fp32, or float64 for such a model."""
        return self.dtype if self.narrow_masters else torch.promote_types(self.dtype, torch.float32)


class StoreFactory(Protocol):
    """Decides where each unit's shard is kept."""

    def make(self, values: Tensor, facts: ShardFacts) -> tuple[ShardStore | None, ValueStore]:
        """Make the stores of a shard with these first ``values`` (flat, on the device); no ShardStore for a
        frozen one. Raises DiskError.
        """


@dataclass(frozen=True, slots=True)
class DeviceStores:
    """Keeps every shard on the compute device."""

    narrow_masters: bool = False

    def make(self, values: Tensor, facts: ShardFacts) -> tuple[ShardStore | None, ValueStore]:
        """Make stores on the device."""
        facts = replace(facts, narrow_masters=self.narrow_masters)
        if facts.trainable:
            master = master_on_device(values, facts)
            store = DeviceStore(
                master, DeviceValues(facts.in_unit if facts.in_unit is not None else master), facts.cuts
            )
            return store, store.values
        return None, DeviceValues(values_on_device(values, facts))


def master_on_device(values: Tensor, facts: ShardFacts) -> Tensor:
    """Return the master values on the device: the unit's memory where that has their dtype."""
    if facts.in_unit is None:
        # Memory that gathers send from: other ranks may read it (Comm.empty).
        return facts.comm.empty(values.numel(), facts.master_dtype).copy_(values)
    if facts.in_unit.dtype == facts.master_dtype:
        return facts.in_unit
    # A copy in any case: the values may be the unit's memory, which a gather overwrites.
    return values.to(facts.master_dtype, copy=True)


def values_on_device(values: Tensor, facts: ShardFacts) -> Tensor:
    """Return the values on the device in the compute dtype: the unit's memory where that stays."""
    if facts.in_unit is not None:
        return facts.in_unit
    return facts.comm.empty(values.numel(), facts.dtype).copy_(values)


class DeviceValues(ValueStore):
    """Keeps values on the device: the master values themselves, or a part of a unit that stays whole."""

    tensor: Tensor

    def __init__(
        self,
        tensor: Tensor,
        upload: Callable[[Tensor, Tensor, torch.cuda.Event | None], Pending] | None = None,
    ) -> None:
        """Keep ``tensor``; ``upload(source, target, after)`` starts a copy from a master on the host."""
        super().__init__(tensor)
        self._upload = upload

    def write(self, start: int, values: Tensor, after: torch.cuda.Event | None = None) -> Pending:
        """Replace elements; nothing is done where ``values`` are the elements themselves."""
        self.settled = None
        if values.data_ptr() == self.tensor.data_ptr() + start * self.tensor.itemsize:
            return DONE
        target = self.tensor[start : start + values.numel()]
        if self._upload is not None and values.device.type != target.device.type:
            return self._upload(values, target, after)
        target.copy_(values)
        return DONE


class DeviceStore(ShardStore):
    """Keeps master values and gradient on the device; the optimizer has the state."""

    on_device = True
    master: Tensor

    def __init__(self, master: Tensor, values: ValueStore, cuts: Sequence[Range]) -> None:
        super().__init__(master, values, cuts, [(0, master.numel())])
        self._accumulation_dtype = master.dtype

    @property
    def compute_copy(self) -> Tensor | None:
        """Return the values kept in another dtype than the master's, if there are any on the device."""
        if isinstance(self.values, DeviceValues) and self.values.tensor.dtype != self.master.dtype:
            return self.values.tensor
        return None

    def publish(self, *, copy_is_new: bool) -> None:
        """Write new master values to where gathers read."""
        if not copy_is_new or self.compute_copy is None:
            self.values.write(0, self.master)

    def open(self, tile: Range, access: Access) -> OpenTile:
        """Show a part of the shard."""
        start, stop = tile
        grad = self.grad()[start:stop] if access is Access.STEP else None
        return OpenTile(self.values, TileView(start, stop, self.master[start:stop], grad))

    def room_for_grad(self, first: bool, dtype: torch.dtype, accumulation_dtype: torch.dtype) -> Tensor:
        """Return the gradient itself for the first of a step."""
        self._accumulation_dtype = accumulation_dtype
        memory = self.grad_memory
        # Separate memory, because the sum so far is in the gradient's.
        if not first:
            return torch.empty_like(self.master, dtype=dtype)
        if memory is None or memory.dtype != accumulation_dtype:
            self.grad_memory = memory = torch.empty_like(self.master, dtype=accumulation_dtype)
        return memory

    def add_grad(self, shard: Tensor, *, first: bool, stays: bool) -> None:
        """Add a gradient; keep one that ``stays``, or is in the gradient's memory, without a copy."""
        if stays or self.grad_memory is None:
            self.grad_memory = shard
        elif not first:
            # First to the dtype of sums: 16-bit sums would lose digits.
            self.grad_memory = self.grad_memory.to(self._accumulation_dtype).add_(shard)
        elif shard is not self.grad_memory:
            self.grad_memory.copy_(shard)
        self.has_grad = True

    def grad(self) -> Tensor:
        """Return the gradient."""
        assert self.grad_memory is not None
        return self.grad_memory


_Tiles = Generator[tuple[T, OpenTile, TileView], None, None]


def open_tiles(work: Sequence[tuple[ShardStore, Range, T]], access: Access) -> closing[_Tiles[T]]:
    """Open tiles one after the other, each with the caller's item for it, and close each when the next one is
    asked for. Those that follow are read as far ahead as there is room.

    The result is a context; inside it after an exception the present tile is not written. Raises DiskError.
    """
    return closing(_each_tile(work, access))


def open_all(store: ShardStore, access: Access) -> closing[_Tiles[None]]:
    """Open all tiles of a store, as :func:`open_tiles` does."""
    return open_tiles([(store, tile, None) for tile in store.tiles], access)


def _each_tile(work: Sequence[tuple[ShardStore, Range, T]], access: Access) -> _Tiles[T]:
    ahead: deque[OpenTile] = deque()
    position = 0
    # Tiles that an earlier loop has closed may still be on their way to the disk. A read of them would find
    # older content.
    for store in _distinct(store for store, _, _ in work):
        store.drain()
    try:
        for _, _, item in work:
            # The next tile always, also where it has to wait for room; those behind it only where there is
            # room.
            while position < len(work) and (not ahead or work[position][0].has_room):
                store, tile, _ = work[position]
                ahead.append(store.open(tile, access))
                position += 1
            current = ahead.popleft()
            try:
                yield item, current, current.wait()
            except BaseException:
                # Nothing is written after an error: the tile on disk stays as it was.
                current.abandon()
                raise
            current.close()
        # Errors of the last writes are raised here, inside the step, load or save that they belong to.
        for store in _distinct(store for store, _, _ in work):
            store.drain()
    finally:
        for unused in ahead:
            # Buffers of tiles that were read ahead go back to the ring.
            unused.abandon()


def _distinct(stores: Iterable[ShardStore]) -> list[ShardStore]:
    return list({id(store): store for store in stores}.values())


def squares_of(parts: Sequence[Tensor]) -> list[Tensor]:
    """Sum the squares of flat tensors of one device: 0-dim float64 each, for any input dtypes."""
    narrow = iter(sums_of_squares([part for part in parts if part.dtype != torch.float64]))
    return [part.square().sum() if part.dtype == torch.float64 else next(narrow) for part in parts]


def take_changed(master: Tensor, values: Tensor) -> None:
    """Overwrite the elements of ``master`` (flat) that do not round to ``values`` (any dtype, any device);
    the others keep their further digits.
    """
    for start in range(0, master.numel(), _PIECE_NUMEL):
        kept = master[start : start + _PIECE_NUMEL]
        new = values[start : start + _PIECE_NUMEL].to(kept.device)
        # Elements that still round to what the script sees have not been written. Their masters keep the
        # digits that the rounding lost.
        kept.copy_(torch.where(kept.to(new.dtype) != new, new.to(kept.dtype), kept))


_PIECE_NUMEL = 4_000_000
