"""A unit: a group of parameters that lives in one flat buffer, and the states that the buffer is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from ..comm import DONE, Comm, Pending
from . import guards
from .layout import Layout, Piece


class UnitState(Enum):
    """Where the values of a unit's parameters are."""

    FULL = auto()
    """Every rank has all of them; the parameters are views of the flat buffer."""
    GATHERING = auto()
    """A collective is filling the flat buffer."""
    SHARDED = auto()
    """Only each rank's own slice exists; the parameters are placeholders."""


class Unit:
    """Parameters of one dtype, device and trainability in one flat buffer of ``layout.numel`` elements.

    Note [One storage per unit]. Autograd saves parameters and views of them (``weight.t()``) for the backward
    pass. Those views share the *storage* of ``full``, so a freed unit must come back in that same storage:
    refilling it makes every saved view right again, while another buffer would give silently wrong gradients.
    Therefore ``full`` and the parameters' views of it are made once, freeing is ``resize_(0)`` of the
    storage, and gathering resizes it back. None of this touches a version counter. Reading a saved view of a
    freed storage crashes the process on a CPU: with ``poison`` the memory is kept and filled with NaN
    instead, to find such a bug.

    Attributes
        full: flat, ``layout.numel`` elements in the compute dtype; storage of size 0 while SHARDED. start,
        stop: the range of elements that this rank updates (all of them at stage 0). master: fp32 (or wider),
        ``stop - start`` elements, what the optimizer updates; a view of ``full`` where that
            has the same dtype and stays; None for frozen parameters.
        home: where this rank's slice of a SHARDED unit rests (the master, or the frozen values); None at
        stages 0-2. grad: fp32 (or wider), like ``master``: the summed, not averaged, gradient; allocated by
        the first backward.
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
        poison: bool = False,
    ) -> None:
        self.name, self.names, self.parameters, self.layout = name, list(names), list(parameters), layout
        self.shapes = [p.shape for p in parameters]
        self.comm, self.dtype, self.device = comm, dtype, comm.device
        self.trainable = parameters[0].requires_grad
        self.shard_params, self.poison = shard_params, poison
        self.state = UnitState.FULL
        self.on_demand: Callable[[Unit], bool] | None = None
        self.holds = 0
        """How many callers need the unit FULL at the moment; it is not freed while there are any."""
        self._pending: Pending = DONE
        self._own = slice(*layout.shard_range(comm.rank))
        self.start, self.stop = layout.shard_range(comm.rank) if shard_optimizer else (0, layout.numel)
        self.pieces: list[Piece] = layout.pieces(self.start, self.stop) if self.trainable else []
        self.master: Tensor | None = None
        self.home: Tensor | None = None
        self.grad: Tensor | None = None
        self._adopt_values(shard_optimizer)
        if shard_params:
            self.free()

    @property
    def numel(self) -> int:
        return self.layout.numel

    def _adopt_values(self, shard_optimizer: bool) -> None:
        """Copy the parameters' values (rank 0's, for all ranks) into the flat buffer and make them views of
        it.
        """
        wide = torch.promote_types(self.parameters[0].dtype, self.dtype)
        with torch.no_grad():
            flat = torch.zeros(self.numel, dtype=wide, device=self.device)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                flat[slot.offset : slot.stop].copy_(parameter.detach().reshape(-1))
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
            nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
            self._placeholders = [nan.expand(shape) for shape in self.shapes]
            if self.trainable:
                accumulate = torch.promote_types(self.dtype, torch.float32)
                own = flat[self.start : self.stop]
                alias = self.full.dtype == accumulate and not self.shard_params
                if alias:
                    self.master = self.full[self.start : self.stop]
                elif self.shard_params:
                    self.master = self.comm.empty(own.numel(), accumulate).copy_(own)
                else:
                    self.master = own.to(accumulate, copy=True)
            if self.shard_params:
                own = self.full[self._own]
                self.home = (
                    self.master if self.trainable else self.comm.empty(own.numel(), self.dtype).copy_(own)
                )
        for parameter in self.parameters:
            guards.adopt(parameter, self)
        self._point(self._views, nn.Parameter)

    def _point(self, tensors: Sequence[Tensor], kind: type[nn.Parameter]) -> None:
        """Give every parameter its values and then its class; plain parameters must be plain to be assigned
        to.
        """
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            if parameter.__class__ is not nn.Parameter and issubclass(parameter.__class__, _GUARDED):
                parameter.__class__ = nn.Parameter
            parameter.data = tensor
            if parameter.__class__ is nn.Parameter:
                parameter.__class__ = kind

    def _move(self, expected: tuple[UnitState, ...], to: UnitState) -> None:
        assert self.state in expected, f"unit {self.name}: {self.state.name} -> {to.name}"
        self.state = to

    def start_gather(self) -> None:
        """SHARDED -> GATHERING: bring the storage back and ask the other ranks for their slices."""
        self._move((UnitState.SHARDED,), UnitState.GATHERING)
        assert self.home is not None
        if self._storage.nbytes() != self._storage_nbytes:
            self._storage.resize_(self._storage_nbytes)
        with torch.no_grad():
            self._pending = self.comm.all_gather(self.full, self.home)

    def start_refresh(self) -> None:
        """After an optimizer step, for a unit that stays FULL: bring everyone the new values.

        With one writer (stage 0) there is nothing to gather. Until the values have arrived, a touch of a
        parameter waits for them.
        """
        assert self.master is not None
        with torch.no_grad():
            own = self.full[self.start : self.stop]
            if own.data_ptr() != self.master.data_ptr():
                own.copy_(self.master)
            if self.stop - self.start == self.numel:
                return
            self._move((UnitState.FULL,), UnitState.GATHERING)
            self._pending = self.comm.all_gather(self.full, own)
        if all(p.__class__ is nn.Parameter for p in self.parameters):
            for parameter in self.parameters:
                parameter.__class__ = guards.PendingParameter
        else:  # a parameter class of the user's own cannot be guarded
            self.ensure_full()

    def ensure_full(self) -> None:
        """Whatever the state, return FULL."""
        if self.state is UnitState.SHARDED:
            self.start_gather()
        if self.state is UnitState.GATHERING:
            self._pending.wait()
            self._pending = DONE
            self._move((UnitState.GATHERING,), UnitState.FULL)
            self._point(self._views, nn.Parameter)

    def free(self) -> None:
        """FULL -> SHARDED, for a unit whose parameters are sharded and which nobody holds; else nothing."""
        if not self.shard_params or self.holds or self.state is UnitState.SHARDED:
            return
        if self.state is UnitState.GATHERING:
            self.ensure_full()
        self._move((UnitState.FULL,), UnitState.SHARDED)
        self._point(self._placeholders, guards.ShardedParameter)
        if self.poison:
            self.full.fill_(float("nan"))
        else:
            self._storage.resize_(0)

    def store(self) -> None:
        """Take over values that somebody wrote into the FULL parameters (the same on every rank)."""
        assert self.state is UnitState.FULL
        self.comm.settle()
        with torch.no_grad():
            if self.master is not None and self.master.data_ptr() != self.full[self.start].data_ptr():
                self.master.copy_(self.full[self.start : self.stop])
            elif self.home is not None and self.home is not self.master:
                self.home.copy_(self.full[self._own])

    def detach(self) -> None:
        """Give the parameters independent values of their own again and let go of them."""
        self.ensure_full()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view.clone()
            guards.release(parameter)
        self.full = torch.empty(0, dtype=self.dtype, device=self.device)
        self._views, self.master, self.home, self.grad = [], None, None, None


_GUARDED = (guards.PendingParameter, guards.ShardedParameter)
