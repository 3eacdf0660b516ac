"""Groups parameters into a unit, which lives in one flat buffer, and moves it between its states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..comm.collectives import Comm
from ..comm.pending import DONE, Pending
from ..device import named
from ..errors import OptimizerError
from . import placeholder
from .layout import TILE_NUMEL, Layout, Piece, cuts_of
from .placeholder import GRADIENTS, MASTERS, VALUES, UnitState, check_on_device
from .store import (
    Access,
    DeviceStores,
    DeviceValues,
    SettledValues,
    ShardFacts,
    StoreFactory,
    open_all,
    take_changed,
)

if TYPE_CHECKING:
    from .reduce import GradientReducer

# -- external writes --------------------------------------------------------------------------------
#
# Copies what a script writes into parameters between two steps back to the master values.
#
# Where the optimizer's master values are not the memory that the model reads (16-bit training, offloaded
# state), the next step would undo a change in place (weight clipping, an averaged model). Writing through
# autograd's view of a parameter moves its version counter; ``parameter.data`` does not, so reading that
# marks the unit.


class ExternalWrites:
    """Detects writes of the script into a unit's parameters since :meth:`forget`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._exposed = False
        self._versions = self._references = 0
        self._arrived: Tensor | None = None
        """Keeps this rank's slice of an exposed unit as it has arrived, where the store has other values: the
        unit was rounded on its way, or a backward pass steps it.
        """
        self._is_stepped = False
        """Tells that a backward pass steps the store of a sharded unit that is still gathered."""
        self._each: list[int] = []
        """Keeps each parameter's version when a sharded unit was gathered."""
        self._masters_ahead = False
        """Tells that the masters have been stepped, and the parameters not yet: :meth:`step_ahead`."""
        self._before: Tensor | None = None
        """Keeps the values of an exposed unit whose masters are ahead."""

    @property
    def has_separate_masters(self) -> bool:
        """Return whether the masters are separate memory, so that writes have to be copied to them."""
        store = self._unit.store
        if store is None or self._unit.shard_params:
            return False
        return (
            store.master is None or store.master.data_ptr() != self._unit.full[self._unit.start :].data_ptr()
        )

    def expose(self) -> None:
        """Note that ``data`` of a parameter has been handed out: later changes of it leave no trace."""
        if (self._unit.is_rounded or self._is_stepped) and not self._exposed:
            self._arrived = self._unit.own_part().clone()
        self._exposed = True
        if self._masters_ahead and self._before is None:
            self._before = self._unit.full.clone()

    def step_ahead(self) -> None:
        """Note that a backward pass steps the masters now, before the parameters. What is written into these
        until the next :meth:`sync_to_masters` cannot be copied to the masters: an element that differs from
        its master may be a write, or the step.
        """
        self._masters_ahead = self.has_separate_masters
        if self._masters_ahead and self._exposed:
            self._before = self._unit.full.clone()
        self._is_stepped = self._unit.shard_params
        if self._is_stepped and self._exposed and self._arrived is None:
            values = self._unit.values.tensor
            self._arrived = None if values is None else values.clone()

    def forget(self) -> None:
        """Note that the masters agree with the parameters."""
        if self._unit.shard_params:
            self.arrive()
        elif self.has_separate_masters:
            self._versions = self._count()
            references = self._unit.references()
            self._references = self._references or references
            # a script that still holds such a tensor may write to it once more
            self._exposed = self._exposed and references > self._references
        self._masters_ahead = False
        self._before = None

    def arrive(self) -> None:
        """Note that the unit has been gathered: what is written from now on is lost when it is resharded."""
        if self._unit.shard_params:
            self._exposed = False
            self._arrived = None
            self._is_stepped = False
            self._each = [parameter._version for parameter in self._unit.parameters]

    def find_lost(self) -> str | None:
        """Return the name of what is lost if the unit is resharded now; None if nothing was written."""
        unit = self._unit
        if unit.provisional:
            return None
        for parameter, name, before in zip(unit.parameters, unit.names, self._each, strict=False):
            if parameter._version != before:
                return name
        arrived = unit.values.tensor if self._arrived is None else self._arrived
        if not self._exposed or arrived is None:
            return None
        unit.values.flush()
        own = unit.own_part()
        return None if torch.equal(arrived.to(own.device, own.dtype), own) else unit.name

    def stepped(self) -> None:
        """Note that the engine has moved every version counter by one."""
        # Otherwise a step would look like a write of the script.
        self._versions += len(self._unit.parameters)
        self._each = [version + 1 for version in self._each]

    def _count(self) -> int:
        return sum(parameter._version for parameter in self._unit.parameters)

    def sync_to_masters(self) -> None:
        """Copy every element that is not its master's rounding to the masters. Raises DiskError, and
        OptimizerError for what was written after :meth:`step_ahead`.
        """
        unit = self._unit
        if self._masters_ahead:
            if self._count() != self._versions or (self._before is not None and not self._is_untouched()):
                raise OptimizerError(
                    f"a parameter of {unit.name} was changed between the backward pass and engine.step(), "
                    "after zero_optimization.step_in_backward had stepped it. Change parameters after "
                    "engine.step(), and load the last checkpoint"
                )
            self._masters_ahead = False
            self._before = None
            return
        if not self.has_separate_masters or not (self._exposed or self._count() != self._versions):
            return
        assert unit.store is not None
        own = unit.full[unit.start : unit.stop]
        with torch.no_grad(), open_all(unit.store, Access.MASTER) as tiles:
            for _, _, tile in tiles:
                take_changed(tile.master, own[tile.start : tile.stop])
        self.forget()

    def _is_untouched(self) -> bool:
        """Tell whether an exposed unit has what a step in the backward pass leaves: this rank's shard is its
        masters' rounding, stepped or not, and the others' shards are as they were.
        """
        unit = self._unit
        before = self._before
        assert before is not None and unit.store is not None
        others = (slice(0, unit.start), slice(unit.stop, None))
        if not all(torch.equal(before[part], unit.full[part]) for part in others):
            return False
        own = unit.full[unit.start : unit.stop]
        with torch.no_grad(), open_all(unit.store, Access.MASTER) as tiles:
            return all(
                bool((tile.master.to(own.dtype) == own[tile.start : tile.stop]).all()) for _, _, tile in tiles
            )


# -- unit -------------------------------------------------------------------------------------------


class LiveElements:
    """Counts the elements of sharded units that are gathered, or on their way, at one time."""

    def __init__(self) -> None:
        self.numel = 0

    def watch(self, unit: Unit) -> None:
        """Count a unit from now on."""
        unit.live = self
        if unit.state is not UnitState.SHARDED:
            self.numel += unit.numel

    def leave(self, unit: Unit) -> None:
        """Count a unit no more."""
        if unit.live is self:
            unit.live = None
            if unit.state is not UnitState.SHARDED:
                self.numel -= unit.numel


class Unit:
    """Keeps parameters of one dtype, device and trainability in one flat buffer of ``layout.numel`` elements.

    Note [One storage per unit]. Views that autograd saves share the *storage* of ``full``, so a gathered unit
    must come back in that storage: resharding is ``resize_(0)``, gathering resizes it back. Reading a view of
    a released storage crashes the process on a CPU, so the memory stays while a view is held; the unit is
    gathered before its next use in any case. With ``poison`` the memory is kept and filled with NaN instead.

    Attributes
        full: flat, ``layout.numel`` elements in the compute dtype; storage of size 0 while SHARDED.
        start, stop: the range of elements that this rank keeps: its shard; all of them at stage 0 and of a
            frozen unit that stays whole.
        values: the store of what gathers send; of a frozen unit that stays whole: all of it.
        store: of a trained unit, the store of what the optimizer updates; None for a frozen one.
        is_rounded: what is gathered was rounded on its way.
        copies: how many ranks keep what this rank keeps of a trained unit.
        generation: how many times the values have been changed; a graph made before cannot be used after.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        comm: Comm,
        *,
        dtype: torch.dtype,
        shard_optimizer: bool,
        shard_params: bool,
        stores: StoreFactory | None = None,
        is_new: bool = False,
        tile_numel: int = TILE_NUMEL,
        provisional: bool = False,
        poison: bool = False,
        stage3: bool | None = None,
    ) -> None:
        """Build a unit. ``provisional``: made while the model is built; its parameters are handed on to an
        engine's units later, and it has no optimizer state. ``stage3``: its parameters would be sharded if
        they were large enough; by default as ``shard_params``. ``is_new``: made in the middle of a run.
        """
        self.name = name
        self.names = list(names)
        self.parameters = list(parameters)
        self.layout = layout
        self.full: Tensor
        self.shapes = [placeholder.shape_of(p) for p in parameters]
        self.index_of = {id(p): index for index, p in enumerate(parameters)}
        self.link, self.data, copies = comm.find_shard_link(parameters[0])
        self.tag = comm.label(name, self.link)
        self.offsets = [slot.offset for slot in layout.slots]
        self.copies = copies * self.data.size // (self.link.shards if shard_optimizer else 1)
        self.generation = 0
        self.writes = ExternalWrites(self)
        self.gradients: GradientReducer | None = None
        """Collects the gradients of its parameters."""
        self.comm = comm
        self.dtype = dtype
        self.device = comm.device
        self.provisional = provisional
        self.is_rounded = False
        self.trainable = parameters[0].requires_grad and not provisional
        self.shard_params = shard_params
        self.poison = poison
        self.stage3 = shard_params if stage3 is None else stage3
        self.state = UnitState.UNSHARDED
        self.on_demand: Callable[[Unit], bool] | None = None
        """Called when a sharded parameter is used (``placeholder.py``); returns whether it was gathered. Set
        by ``ShardedModel`` in hooks.py, and by script/construct.py while a model is built.
        """
        self.is_needed: Callable[[Unit], bool] | None = None
        """Called when the last hold ends; returns whether a pass still needs the values. Set by
        ``ShardedModel`` in hooks.py.
        """
        self.on_empty: Callable[[], None] | None = None
        """Called when the last parameter of a provisional unit has been handed over."""
        self.offloaded_states: frozenset[str] = frozenset()
        """Names the states that ``engine.offload_states()`` has moved to host memory."""
        self.live: LiveElements | None = None
        """Counts this unit while it is gathered. Set by ``ShardedModel`` in hooks.py."""
        self._holds = 0
        self._pending: Pending = DONE
        self.updated: Pending = DONE
        """Keeps an optimizer step that still writes this rank's values; waited for before they are read."""
        self._own = slice(*layout.shard_range(self.link.position))
        whole = not shard_optimizer or not (self.trainable or shard_params)
        self.start, self.stop = (0, layout.numel) if whole else layout.shard_range(self.link.position)
        self.without_elements = [shape.numel() == 0 for shape in self.shapes]
        """Tells which parameters have no elements on this rank."""
        self.pieces: list[Piece] = layout.pieces(self.start, self.stop) if self.trainable else []
        cuts = cuts_of([(p.start, p.stop) for p in self.pieces], self.stop - self.start, tile_numel)
        flat = self._adopt_values(keep_shared=shard_optimizer and not shard_params)
        facts = ShardFacts(
            dtype=dtype,
            comm=comm,
            trainable=self.trainable,
            in_unit=None if shard_params else self.full[self.start : self.stop],
            cuts=cuts,
            is_new=is_new,
            numel=sum(shape.numel() for shape in self.shapes),
        )
        with torch.no_grad():
            self.store, self.values = (stores or DeviceStores()).make(flat[self.start : self.stop], facts)
        self.writes.forget()
        if shard_params:
            self.reshard()

    @property
    def numel(self) -> int:
        return self.layout.numel

    def _adopt_values(self, *, keep_shared: bool) -> Tensor:
        """Copy the parameters' values (rank 0's, for all ranks) into the flat buffer and make them views of
        it. Returns them in the wider of the parameters' and the compute dtype.
        """
        wide = torch.promote_types(self.parameters[0].dtype, self.dtype)
        with torch.no_grad():
            # See Note [Gaps are zero] in layout.py.
            flat = torch.zeros(self.numel, dtype=wide, device=self.device)
            former = [owner_of(parameter) for parameter in self.parameters]
            for slot, parameter, unit in zip(self.layout.slots, self.parameters, former, strict=True):
                if unit is not None and unit.provisional:
                    unit.wait_unsharded()
                flat[slot.offset : slot.stop].copy_(parameter.detach().reshape(-1))
            # A second loop: hand_over() reshards what is left of a provisional unit, which would be gathered
            # again for each of its parameters.
            for parameter, unit in zip(self.parameters, former, strict=True):
                if unit is not None and unit.provisional:
                    unit.hand_over(parameter)
            # Among the ranks that have this part: parts of tensor and expert parallelism differ.
            self.comm.broadcast(flat, among=self.data)
            self.full = flat if wide == self.dtype else flat.to(self.dtype)
            # refresh() gathers from this memory itself.
            if keep_shared:
                self.full = self.comm.empty(self.numel, self.dtype).copy_(self.full)
            self._storage = self.full.untyped_storage()
            self.memory = int(self._storage._cdata)  # identifies the storage, for as long as the unit lives
            self._storage_nbytes = self._storage.nbytes()
            self._views = [
                self.full[slot.offset : slot.stop].view(shape)
                for slot, shape in zip(self.layout.slots, self.shapes, strict=True)
            ]
            # constructors read the shapes of what is sharded already, such as torch's MultiheadAttention
            empty = placeholder.settings.empty_placeholders and not self.provisional
            self.has_empty_placeholders = self.shard_params and empty
            self._placeholders = self._make_placeholders(empty=empty)
        self._own_classes = [placeholder.own_class(parameter) for parameter in self.parameters]
        self._kinds = [placeholder.kinds_for(kind) for kind in self._own_classes]
        for parameter in self.parameters:
            placeholder.adopt(parameter, self)
        self._point(self._views, [kinds.managed for kinds in self._kinds])
        return flat

    def _make_placeholders(self, *, empty: bool) -> list[Tensor]:
        """Make what parameters are while they are sharded: NaN in their shapes, or no elements."""
        # each parameter at a separate address
        nans = torch.full((len(self.shapes), 1), float("nan"), dtype=self.dtype, device=self.device)
        return [
            nan.view(()).expand(0 if empty else shape) for nan, shape in zip(nans, self.shapes, strict=True)
        ]

    def empty_placeholders(self) -> None:
        """Leave parameters no elements while they are sharded, as DeepSpeed does, once the model is built."""
        self.has_empty_placeholders = True
        self._placeholders = self._make_placeholders(empty=True)
        if self.state is UnitState.SHARDED:
            self._point(self._placeholders, [kinds.sharded for kinds in self._kinds])

    def _point(self, tensors: Sequence[Tensor], kinds: Sequence[type[nn.Parameter]]) -> None:
        """Set every parameter's memory and class."""
        for parameter, tensor, kind in zip(self.parameters, tensors, kinds, strict=True):
            placeholder.point(parameter, tensor, kind)

    def check_on_device(self, *states: str) -> None:
        """Raise OffloadedError if one of these states has been moved to host memory."""
        if self.offloaded_states:
            check_on_device(self.offloaded_states, states, f"using {self.names[0]}")

    def _move(self, expected: tuple[UnitState, ...], to: UnitState) -> None:
        assert self.state in expected, f"unit {self.name}: {self.state.name} -> {to.name}"
        if self.live is not None:
            if self.state is UnitState.SHARDED:
                self.live.numel += self.numel
            elif to is UnitState.SHARDED:
                self.live.numel -= self.numel
        self.state = to

    def unshard(self, *, rounded: bool = False) -> None:
        """Allocate the storage and start to gather the other ranks' slices; a pass allows rounded ones."""
        self.check_on_device(VALUES)
        self._move((UnitState.SHARDED,), UnitState.GATHERING)
        self.is_rounded = rounded and not self.provisional and self.link.rounds(self.trainable)
        updated = self.updated
        self.updated = DONE
        # A step in the background may still write the values that this gather sends.
        updated.wait()
        with named(f"gather {self.name}"):
            self._pending = self.values.start_gather(self)

    def prepare_gather(self) -> SettledValues | None:
        """Allocate the memory of the next gather, and mark the stream: the gather may begin here, behind what
        has written this rank's values. None where it cannot.
        """
        if not (self.link.gathers_on_any_stream and self.values.is_gathered_directly):
            return None
        if self.shard_params:
            # Memory that has stayed is a view's in the script, which may still read it: see Note [One storage
            # per unit].
            if self.state is not UnitState.SHARDED or self._storage.nbytes():
                return None
            # Before the mark: earlier work on the stream may still use this memory for its former owner.
            try:
                self._refill()
            except torch.OutOfMemoryError:  # the step, half made, does without
                return None
        elif self.state is not UnitState.UNSHARDED:
            return None
        return SettledValues.now(self.device)

    def forget_gather(self) -> None:
        """Release the memory that :meth:`prepare_gather` has allocated, if the gather has not begun."""
        if self.state is UnitState.SHARDED and self._storage.nbytes():
            self._release_memory()
        self.values.settled = None

    def make_room(self) -> None:
        """Prepare a gather that has been started, before the block in front of this unit's is queued."""
        if self.state is UnitState.GATHERING:
            self.values.make_room(self)

    def own_part(self) -> Tensor:
        """Return this rank's slice of the flat buffer, whose memory is allocated."""
        self._refill()
        return self.full[self._own]

    def _refill(self) -> None:
        # Resharding leaves the memory where a view is held.
        if self._storage.nbytes() != self._storage_nbytes:
            self._storage.resize_(self._storage_nbytes)

    def gather_from(self, source: Tensor) -> Pending:
        """Allocate the storage and start to fill it from every rank's ``source``."""
        settled = self.values.settled
        self.values.settled = None
        if settled is not None and not settled.is_of_current_stream:
            # The memory belongs to another stream than the one that will use and release it.
            settled = None
            if self.shard_params:
                self._storage.resize_(0)
        self._refill()
        with torch.no_grad(), nullcontext() if settled is None else settled.behind():
            return self.comm.all_gather(self.full, source, self.tag, self.is_rounded)

    def refresh(self) -> None:
        """Start to gather the new values of a unit that stays UNSHARDED, after an optimizer step.

        With one writer (stage 0) there is nothing to gather. Until the values have arrived, a touch of a
        parameter waits for them.
        """
        if self.stop - self.start == self.numel:
            return
        self._move((UnitState.UNSHARDED,), UnitState.GATHERING)
        self._pending = self.gather_from(self.full[self.start : self.stop])
        self._guard()

    def await_update(self, arrival: Pending) -> None:
        """Make a first use wait for ``arrival``, for a unit that stays UNSHARDED and whose new values are
        being written in the background.
        """
        self._move((UnitState.UNSHARDED,), UnitState.GATHERING)
        self._pending = arrival
        self._guard()

    def _guard(self) -> None:
        for parameter, kinds in zip(self.parameters, self._kinds, strict=True):
            parameter.__class__ = kinds.pending

    def wait_unsharded(self, *, rounded: bool = False) -> None:
        """Wait until the unit is UNSHARDED, and exact unless ``rounded``. Raises OffloadedError."""
        # Of what is SHARDED, or AWAY, the values may be in host memory.
        if self.state is not UnitState.UNSHARDED:
            self.check_on_device(VALUES)
        if self.state is UnitState.SHARDED:
            self.unshard(rounded=rounded)
        if self.state is UnitState.GATHERING:
            self._pending.wait()
            self._pending = DONE
            self._move((UnitState.GATHERING,), UnitState.UNSHARDED)
            self._point(self._views, [kinds.managed for kinds in self._kinds])
            self.writes.arrive()
        # Gathered for a pass, in few bits. What a script reads, writes or saves has to be exact.
        if self.is_rounded and not rounded:
            self.reshard()
            self.wait_unsharded()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the unit UNSHARDED inside the context, and afterwards where a pass still needs it. Collective,
        if it is not UNSHARDED yet.
        """
        self.wait_unsharded()
        self._holds += 1
        try:
            yield
        except BaseException:
            self.writes.arrive()  # this error counts, not what was written before it
            raise
        finally:
            self._holds -= 1
            if self.is_needed is None or not self.is_needed(self):
                self.reshard()

    def reshard(self) -> None:
        """Reshard a sharded unit that is not held: UNSHARDED -> SHARDED; else do nothing."""
        if not self.shard_params or self._holds or self.state is UnitState.SHARDED:
            return
        if self.state is UnitState.GATHERING:
            # The collective still writes into the storage, whose memory goes below.
            self.wait_unsharded(rounded=True)
        # Before the memory goes: it compares values.
        lost = self.writes.find_lost()
        self._move((UnitState.UNSHARDED,), UnitState.SHARDED)
        self._point(self._placeholders, [kinds.sharded for kinds in self._kinds])
        self._release_memory()
        # Last, when the unit is consistent: the script may catch the error and go on.
        if lost is not None:
            placeholder.complain(lost)

    def _release_memory(self) -> None:
        self.values.settled = None  # it was a mark behind the allocation of this memory
        # See Note [One storage per unit]: nothing may read released memory.
        if self.is_viewed() or not self._storage.resizable():  # NumPy may have been given it
            return
        if self.poison:
            self.full.fill_(float("nan"))
        else:
            self._storage.resize_(0)

    def write_back(self) -> None:
        """Copy values written into the unsharded parameters (equal on every rank) back to the stores. Raises
        DiskError.
        """
        self.check_on_device(MASTERS, VALUES)
        assert self.state is UnitState.UNSHARDED
        # Other ranks may still read this rank's part of an earlier gather.
        self.comm.drain()
        own = self.full[self.start : self.stop]
        with torch.no_grad():
            if self.store is not None:
                # Masters and values both: see Note [New values] in store.py.
                with open_all(self.store, Access.REPLACE) as tiles:
                    for _, _, tile in tiles:
                        if tile.master.data_ptr() != own[tile.start :].data_ptr():
                            tile.master.copy_(own[tile.start : tile.stop])
            self.values.write(0, own)
            self.values.flush()
        self.changed()

    def changed(self) -> None:
        """Note that the values are new ones: graphs that saved the former ones are invalid."""
        self.stepped()
        self.writes.forget()

    def stepped(self) -> None:
        """Note that an optimizer step has changed, or is about to change, the values."""
        # Three things have the former values: graphs by their generation, copies that the link keeps for
        # repeated gathers, and what autograd has saved with a version.
        self.generation += 1
        self.link.changed(self.tag)
        placeholder.move_versions(self.parameters)
        self.writes.stepped()

    def is_viewed(self) -> bool:
        """Tell whether a tensor outside the unit lies on the flat buffer's memory."""
        own = 2 + len(self._views)  # full, the storage itself, the views
        if self.state is UnitState.UNSHARDED:
            own += len(self.parameters)
        return self.references() > own

    def references(self) -> int:
        """Return how many tensors lie on the flat buffer's memory, the unit's among them."""
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def await_gradient(self, index: int) -> None:
        """Give parameter ``index``, if it is sharded and has no elements, its true shape: autograd lays a
        gradient out like its parameter.
        """
        if self.state is UnitState.SHARDED:
            shape = self.shapes[index]
            # No memory for it: strides of 0 over what the placeholder has.
            hollow = self._placeholders[index].as_strided(shape, (0,) * len(shape))
            placeholder.point(self.parameters[index], hollow, self._kinds[index].sharded)

    def gradient_taken(self, index: int) -> None:
        """Undo :meth:`await_gradient`."""
        if self.state is UnitState.SHARDED:
            placeholder.point(self.parameters[index], self._placeholders[index], self._kinds[index].sharded)

    def parameter_at(self, element: int) -> int:
        """Return the index of the parameter that an element of the flat buffer belongs to."""
        return max(0, bisect_right(self.offsets, element) - 1)

    def is_in_place(self, index: int) -> bool:
        """Tell whether parameter ``index`` still has the class and the memory that the unit gave it."""
        parameter = self.parameters[index]
        kinds = self._kinds[index]
        if self.state is UnitState.GATHERING:
            return parameter.__class__ in (kinds.pending, kinds.sharded)
        full = self.state is UnitState.UNSHARDED
        where = (self._views if full else self._placeholders)[index].data_ptr()
        kind = kinds.managed if full else kinds.sharded
        return parameter.__class__ is kind and parameter.data_ptr() == where

    def hides_gradient(self, parameter: Tensor) -> bool:
        """Tell whether the engine has taken a gradient of this parameter since the last step."""
        return self.gradients is not None and self.gradients.has(self, self.index_of[id(parameter)])

    def forget_gradient(self, parameter: Tensor) -> None:
        """Drop the gradient accumulated for this parameter since the last step."""
        if self.gradients is not None and self.hides_gradient(parameter):
            self.check_on_device(GRADIENTS)
            self.gradients.forget(self, self.index_of[id(parameter)])

    def expose(self) -> None:
        """Note that ``data`` of a parameter has been handed out."""
        self.writes.expose()

    # -- the end, and a time off the device

    def hand_over(self, parameter: nn.Parameter) -> None:
        """Release one parameter of a provisional unit, whose values another unit has copied."""
        index = self.index_of[id(parameter)]
        placeholder.point(parameter, self._placeholders[index], self._own_classes[index])
        placeholder.release(parameter)
        for each in (self.parameters, self._views, self._placeholders, self._own_classes, self._kinds):
            del each[index]
        del self.shapes[index], self.names[index]
        self.index_of = {id(p): i for i, p in enumerate(self.parameters)}
        if self.parameters:
            self.reshard()
            return
        self._drop_buffer()
        self.values.release()
        if self.on_empty is not None:
            self.on_empty()

    def detach(self) -> None:
        """Give the parameters independent values and release them. Raises DiskError."""
        self.wait_unsharded()
        # Clones: a view would keep the whole flat buffer alive.
        self._let_go([view.clone() for view in self._views])
        self._drop_buffer()
        self._views = []
        self.store = None
        self.values = DeviceValues(self.full)
        self.generation += 1
        self.link.forget(self.tag)
        self.shard_params = False  # it is never resharded again

    def abandon(self) -> None:
        """Release the parameters, whose values are lost."""
        self._let_go(self._placeholders)

    def _let_go(self, values: Sequence[Tensor]) -> None:
        self._point(values, self._own_classes)
        for parameter in self.parameters:
            placeholder.release(parameter)

    def _drop_buffer(self) -> None:
        self.full = torch.empty(0, dtype=self.dtype, device=self.device)
        self._storage = self.full.untyped_storage()

    def hide(self) -> None:
        """Turn the parameters of an UNSHARDED unit into placeholders: its values go off the device."""
        self._move((UnitState.UNSHARDED,), UnitState.AWAY)
        self._point(self._placeholders, [kinds.sharded for kinds in self._kinds])
        self.on_demand = self._refuse

    def show(self) -> None:
        """Point the parameters at their values again, which are back on the device."""
        self._move((UnitState.AWAY,), UnitState.UNSHARDED)
        self._point(self._views, [kinds.managed for kinds in self._kinds])
        self.on_demand = None

    def _refuse(self, unit: Unit) -> bool:
        self.check_on_device(VALUES)
        return False

    def value_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the memory of a unit that is not sharded."""
        yield from (self.full, *self._views)
        if self.values.tensor is not None:
            yield self.values.tensor
        if self.state is not UnitState.AWAY:
            yield from self.parameters


def owner_of(parameter: Tensor) -> Unit | None:
    """Return the unit of a parameter, if a live engine manages it."""
    unit = placeholder.owner(parameter)
    assert unit is None or isinstance(unit, Unit)
    return unit
