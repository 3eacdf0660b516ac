"""A unit: a group of parameters that lives in one flat buffer, and the states that the buffer is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm.collectives import Comm
from ..comm.pending import DONE, Pending
from ..offload.disk_shard import DiskState, DiskValues, cuts_of
from ..offload.host_gradient import GradientHome
from ..offload.manager import TILE_NUMEL, Offload, Place
from ..offload.transfer import end_of
from . import placeholder
from .adopt import hand_over, make_home, make_state, own_class
from .arrivals import ReadAndGather, UploadAndGather
from .external_writes import Writes
from .layout import Layout, Piece
from .moved_states import GRADIENTS, MASTERS, VALUES, check_here


class UnitState(Enum):
    """Where the values of a unit's parameters are."""

    FULL = auto()
    """Every rank has all of them; the parameters are views of the flat buffer."""
    GATHERING = auto()
    """A collective is filling the flat buffer."""
    SHARDED = auto()
    """Only each rank's own slice exists; the parameters are placeholders."""
    AWAY = auto()
    """Marks a unit that is not sharded, whose values are in host memory and parameters placeholders."""


class Unit:
    """Parameters of one dtype, device and trainability in one flat buffer of ``layout.numel`` elements.

    Note [One storage per unit]. Autograd saves parameters and views of them (``weight.t()``) for the backward
    pass. Those views share the *storage* of ``full``, so a freed unit must come back in that same storage:
    refilling it makes every saved view right again, while another buffer would give silently wrong gradients.
    Therefore ``full`` and the parameters' views of it are made once, freeing is ``resize_(0)`` of the
    storage, and gathering resizes it back. None of this touches a version counter. Reading a view of a freed
    storage crashes the process on a CPU, so the memory stays while somebody holds a view of it (what the
    graph saves is no such view, see ``saved.py``): a freed unit is gathered before its next use either way,
    so the ranks need not agree on it. With ``poison`` the memory is kept and filled with NaN instead, to find
    such a bug.

    Attributes
        full: flat, ``layout.numel`` elements in the compute dtype; storage of size 0 while SHARDED.
        start, stop: the range of elements that this rank updates (all of them at stage 0).
        master: fp32 (or wider), ``stop - start`` elements, what the optimizer updates; a view of ``full``
            where that has the same dtype and stays; in host memory with CPU offload; None for frozen
            parameters and where it is on disk.
        disk: the optimizer's records, with NVMe offload.
        home: where this rank's slice of a SHARDED unit rests: the master, or a copy in the compute dtype on
            the device, in host memory or on disk; None at stages 0-2.
        generation: how many times the values have been changed; a graph made before cannot be used after.
        grad: fp32 (or wider), like ``master``: the summed, not averaged, gradient; allocated by the first
            backward. Where the state is offloaded and buckets are transient, it goes to ``gradient_home``.
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
        offload: Offload | None = None,
        state_place: Place = Place.DEVICE,
        tile_numel: int = TILE_NUMEL,
        provisional: bool = False,
        poison: bool = False,
        stage3: bool | None = None,
    ) -> None:
        """``provisional``: made while the model is built; its parameters are handed on to the units of an
        engine later, and it has no optimizer state. ``stage3``: its parameters would be sharded if they were
        not too small for that; by default as ``shard_params``.
        """
        self.name, self.names, self.parameters, self.layout = name, list(names), list(parameters), layout
        self.shapes = [placeholder.shape_of(p) for p in parameters]
        self.index_of = {id(p): index for index, p in enumerate(parameters)}
        self.tag = comm.label(name)
        self.offsets = [slot.offset for slot in layout.slots]
        self.generation = 0
        self.writes = Writes(self)
        self.gradients: GradientBook | None = None
        """What collects the gradients of its parameters."""
        self.comm, self.dtype, self.device = comm, dtype, comm.device
        self.provisional = provisional
        self.trainable = parameters[0].requires_grad and not provisional
        self.shard_params, self.poison = shard_params, poison
        self.stage3 = shard_params if stage3 is None else stage3
        self.state = UnitState.FULL
        self.on_demand: Callable[[Unit], bool] | None = None
        self.on_empty: Callable[[], None] | None = None
        """Called when the last parameter of a provisional unit has been handed over."""
        self.away: frozenset[str] = frozenset()
        """States that ``engine.offload_states()`` has moved to host memory."""
        self._holds = 0
        self._pending: Pending = DONE
        self._offload = offload
        self.updated: Pending = DONE
        self._sent: Pending = DONE
        """New values on their way to the home in host memory."""
        """An optimizer step that still writes this rank's values; waited for before they are read."""
        self._own = slice(*layout.shard_range(comm.rank))
        self.start, self.stop = layout.shard_range(comm.rank) if shard_optimizer else (0, layout.numel)
        self.pieces: list[Piece] = layout.pieces(self.start, self.stop) if self.trainable else []
        pieces = [(piece.start, piece.stop) for piece in self.pieces]
        self.cuts = cuts_of(pieces, self.stop - self.start, tile_numel)
        self.state_place = state_place if self.trainable else Place.DEVICE
        self.master: Tensor | None = None
        self.disk: DiskState | None = None
        self.home: Tensor | DiskValues | None = None
        self.grad: Tensor | None = None
        self.gradient_home: GradientHome | None = None
        self._adopt_values(shard_optimizer, offload)
        self.writes.forget()
        if shard_params:
            self.free()

    @property
    def numel(self) -> int:
        return self.layout.numel

    def _adopt_values(self, shard_optimizer: bool, offload: Offload | None) -> None:
        """Copy the parameters' values (rank 0's, for all ranks) into the flat buffer and make them views of
        it.
        """
        wide = torch.promote_types(self.parameters[0].dtype, self.dtype)
        with torch.no_grad():
            flat = torch.zeros(self.numel, dtype=wide, device=self.device)
            former = [placeholder.owner(parameter) for parameter in self.parameters]
            for slot, parameter, unit in zip(self.layout.slots, self.parameters, former, strict=True):
                if unit is not None and unit.provisional:
                    unit.ensure_full()
                flat[slot.offset : slot.stop].copy_(parameter.detach().reshape(-1))
            for parameter, unit in zip(self.parameters, former, strict=True):
                if unit is not None and unit.provisional:
                    hand_over(unit, parameter)
            self.comm.broadcast(flat)
            self.full = flat if wide == self.dtype else flat.to(self.dtype)
            if shard_optimizer and not self.shard_params:
                self.full = self.comm.empty(self.numel, self.dtype).copy_(self.full)
            self._storage = self.full.untyped_storage()
            self._storage_nbytes = self._storage.nbytes()
            self._views = [
                self.full[slot.offset : slot.stop].view(shape)
                for slot, shape in zip(self.layout.slots, self.shapes, strict=True)
            ]
            # each at an address of its own
            nans = torch.full((len(self.shapes), 1), float("nan"), dtype=self.dtype, device=self.device)
            empty = placeholder.settings.empty_placeholders
            self._placeholders = [
                nan.view(()).expand(0 if empty else shape)
                for nan, shape in zip(nans, self.shapes, strict=True)
            ]
            if self.trainable:
                make_state(self, flat[self.start : self.stop], offload)
            if self.shard_params:
                make_home(self, self.own_part, offload)
        self._own_classes = [own_class(parameter) for parameter in self.parameters]
        self._kinds = [placeholder.kinds_for(kind) for kind in self._own_classes]
        for parameter in self.parameters:
            placeholder.adopt(parameter, self)
        self._point(self._views, [kinds.managed for kinds in self._kinds])

    @property
    def target(self) -> Tensor | DiskValues | None:
        """What an optimizer step away from the device has to write the new values to, in the compute dtype;
        None where the master itself is read.
        """
        if self.shard_params:
            return None if self.home is self.master else self.home
        return self.full[self.start : self.stop]

    @property
    def values_beside_master(self) -> Tensor | None:
        """The values in another dtype that stay on the device beside a master there."""
        beside = self.master is not None and self.master.dtype != self.full.dtype
        if self.shard_params or self.state_place is not Place.DEVICE or not beside:
            return None
        return self.full[self.start : self.stop]

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has left a reduced gradient."""
        return self.grad is not None if self.gradient_home is None else self.gradient_home.delivered

    def reduced_gradient(self) -> Tensor | None:
        """This rank's shard of the summed gradient, flat, wherever it is; None if there is none. Raises
        RuntimeError where it is on disk.
        """
        if self.gradient_home is None:
            return self.grad
        return self.gradient_home.grad if self.gradient_home.delivered else None

    def gradient_was_written(self) -> None:
        """Take note that somebody has changed what :meth:`reduced_gradient` gave."""
        if self.gradient_home is not None and self.gradient_home.delivered:
            self.gradient_home.changed()

    def _point(self, tensors: Sequence[Tensor], kinds: Sequence[type[nn.Parameter]]) -> None:
        """Give every parameter its memory and its class."""
        for parameter, tensor, kind in zip(self.parameters, tensors, kinds, strict=True):
            placeholder.point(parameter, tensor, kind)

    def check_here(self, *states: str) -> None:
        """Raise OffloadedError if one of these states has been moved to host memory."""
        if self.away:
            check_here(self.away, states, f"using {self.names[0]}")

    def _move(self, expected: tuple[UnitState, ...], to: UnitState) -> None:
        assert self.state in expected, f"unit {self.name}: {self.state.name} -> {to.name}"
        self.state = to

    def start_gather(self) -> None:
        """SHARDED -> GATHERING: bring the storage back and ask the other ranks for their slices."""
        self.check_here(VALUES)
        self._move((UnitState.SHARDED,), UnitState.GATHERING)
        assert self.home is not None
        updated, self.updated = self.updated, DONE
        updated.wait()
        if isinstance(self.home, DiskValues):
            self._pending = ReadAndGather(self, self.home.start_read())
            return
        if self._offload is not None and self.home.device != self.device:
            link = self._offload.link
            self._refill()
            upload = link.upload(self.home, self.own_part, link.mark(), end_of(self._sent))
            with link.behind_uploads():
                self._pending = UploadAndGather(upload, self.gather_from(self.own_part))
            return
        self._pending = self.gather_from(self.home)

    @property
    def own_part(self) -> Tensor:
        """This rank's slice of the flat buffer."""
        return self.full[self._own]

    def _refill(self) -> None:
        if self._storage.nbytes() != self._storage_nbytes:
            self._storage.resize_(self._storage_nbytes)

    def gather_from(self, source: Tensor) -> Pending:
        """Bring the storage back and start to fill it from every rank's ``source``."""
        self._refill()
        with torch.no_grad():
            return self.comm.all_gather(self.full, source, self.tag)

    @property
    def update_ready(self) -> bool:
        """Whether reading this rank's values would not wait for an optimizer step."""
        return bool(getattr(self.updated, "ready", True))

    @property
    def rests_elsewhere(self) -> bool:
        """Whether filling it takes more than asking the other ranks."""
        at_home = self.home.device if isinstance(self.home, Tensor) else None
        return self.shard_params and at_home != self.device

    def start_refresh(self, *, written: bool = False) -> None:
        """After an optimizer step, for a unit that stays FULL: bring everyone the new values, which are in
        the master alone unless ``written``.

        With one writer (stage 0) there is nothing to gather. Until the values have arrived, a touch of a
        parameter waits for them.
        """
        with torch.no_grad():
            own = self.full[self.start : self.stop]
            if self.state_place is Place.DEVICE and not written:
                assert self.master is not None
                if own.data_ptr() != self.master.data_ptr():
                    own.copy_(self.master)
            if self.stop - self.start == self.numel:
                return
            self._move((UnitState.FULL,), UnitState.GATHERING)
            self._pending = self.comm.all_gather(self.full, own, self.tag)
        self._guard()

    def send_home(self) -> None:
        """After an optimizer step on the device, for a unit whose shard rests elsewhere than its master.
        Raises DiskError.
        """
        if self.state_place is not Place.DEVICE or self.home is self.master or self.home is None:
            return
        assert self.master is not None
        with torch.no_grad():
            if isinstance(self.home, DiskValues):
                self.home.write(0, self.master)
            elif self._offload is not None and self.home.device != self.device:
                self._sent = self._offload.link.download(self.master.to(self.dtype), self.home)
            else:
                self.home.copy_(self.master)

    def await_home(self) -> None:
        """Return when host memory that the values rest in has those of the last step."""
        self._sent.wait()
        self._sent = DONE

    def await_update(self, arrival: Pending) -> None:
        """For a unit that stays FULL and whose new values are being written in the background: a touch waits
        for ``arrival``.
        """
        self._move((UnitState.FULL,), UnitState.GATHERING)
        self._pending = arrival
        self._guard()

    def _guard(self) -> None:
        for parameter, kinds in zip(self.parameters, self._kinds, strict=True):
            parameter.__class__ = kinds.pending

    def ensure_full(self) -> None:
        """Whatever the state, return FULL. Raises OffloadedError."""
        self.check_here(VALUES)
        if self.state is UnitState.SHARDED:
            self.start_gather()
        if self.state is UnitState.GATHERING:
            self._pending.wait()
            self._pending = DONE
            self._move((UnitState.GATHERING,), UnitState.FULL)
            self._point(self._views, [kinds.managed for kinds in self._kinds])
            self.writes.arrive()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the unit FULL inside the context. Collective, if it is not FULL yet."""
        self.ensure_full()
        self._holds += 1
        try:
            yield
        except BaseException:
            self.writes.arrive()  # this error counts, not what was written before it
            raise
        finally:
            self._holds -= 1
            self.free()

    def free(self) -> None:
        """FULL -> SHARDED, for a unit whose parameters are sharded and which nobody holds; else nothing."""
        if not self.shard_params or self._holds or self.state is UnitState.SHARDED:
            return
        if self.state is UnitState.GATHERING:
            self.ensure_full()
        lost = self.writes.find_lost()
        self._move((UnitState.FULL,), UnitState.SHARDED)
        self._point(self._placeholders, [kinds.sharded for kinds in self._kinds])
        if self.is_viewed() or not self._storage.resizable():  # NumPy may have been given it
            pass
        elif self.poison:
            self.full.fill_(float("nan"))
        else:
            self._storage.resize_(0)
        if lost is not None:
            placeholder.complain(lost)

    def store(self) -> None:
        """Take over values that somebody wrote into the FULL parameters (the same on every rank)."""
        self.check_here(MASTERS, VALUES)
        assert self.state is UnitState.FULL
        self.comm.settle()
        with torch.no_grad():
            own = self.full[self.start : self.stop]
            if self.disk is not None:
                self.disk.write_master(own)
            elif self.master is not None and self.master.data_ptr() != own.data_ptr():
                self.master.copy_(own)
            if isinstance(self.home, DiskValues):
                self.home.write(0, self.full[self._own])
            elif self.home is not None and self.home is not self.master:
                self.await_home()
                self.home.copy_(self.full[self._own])
        self.changed()

    def changed(self) -> None:
        """The values are new ones: a graph that has saved the former ones must not be used any more."""
        self.stepped()
        self.writes.forget()

    def stepped(self) -> None:
        """An optimizer step has changed, or is about to change, the values."""
        self.generation += 1
        placeholder.move_versions(self.parameters)
        self.writes.stepped()

    def is_viewed(self) -> bool:
        """Whether somebody outside holds a tensor over the flat buffer's memory."""
        own = 2 + len(self._views)  # full, the storage itself, the views
        if self.state is UnitState.FULL:
            own += len(self.parameters)
        return self.references() > own

    def references(self) -> int:
        """How many tensors lie on the flat buffer's memory, the unit's own among them."""
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    @property
    def memory(self) -> int:
        """The identity of the flat buffer's memory, for as long as the unit lives."""
        return int(self._storage._cdata)

    def is_in_place(self, index: int) -> bool:
        """Whether parameter ``index`` still is what the unit has made of it: its class and its memory."""
        parameter, kinds = self.parameters[index], self._kinds[index]
        if self.state is UnitState.GATHERING:
            return parameter.__class__ in (kinds.pending, kinds.sharded)
        full = self.state is UnitState.FULL
        where = (self._views if full else self._placeholders)[index].data_ptr()
        kind = kinds.managed if full else kinds.sharded
        return parameter.__class__ is kind and parameter.data_ptr() == where

    def hides_gradient(self, parameter: Tensor) -> bool:
        """Whether the engine has taken a gradient of this parameter since the last step."""
        return self.gradients is not None and self.gradients.has(self, self.index_of[id(parameter)])

    def forget_gradient(self, parameter: Tensor) -> None:
        """Drop what has been accumulated for this parameter since the last step."""
        if self.gradients is not None and self.hides_gradient(parameter):
            self.check_here(GRADIENTS)
            self.gradients.forget(self, self.index_of[id(parameter)])


class GradientBook(Protocol):
    """Who collects gradients and knows which parameters have had one since the last step."""

    def has(self, unit: Unit, index: int) -> bool: ...

    def forget(self, unit: Unit, index: int) -> None: ...

    def clear(self) -> None: ...
