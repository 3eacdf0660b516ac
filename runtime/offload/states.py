"""Moves an engine's states to host memory for a while, to leave the device's memory to others."""

from __future__ import annotations

import time
import warnings
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm.nodes import drop_copies
from ..comm.pending import DONE, Pending
from ..config import Config
from ..environment import read_environment
from ..errors import OffloadedError
from ..host_memory import PINNED_SHARE, host_bytes
from ..optim.step import ShardedOptimizer
from ..zero.hooks import ShardedModel
from ..zero.placeholder import (
    BUFFERS,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    STATES,
    VALUES,
    UnitState,
)
from .transfer import HostLink

_LET_GO_S = 0.2


@dataclass(slots=True, eq=False)
class _Piece:
    """Describes a storage, the engine's tensors on it, and the states that they are."""

    storage: torch.UntypedStorage
    names: set[str] = field(default_factory=set)
    tensors: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_viewed(self) -> bool:
        """Tell whether a tensor outside the engine lies on the storage, too."""
        own = 1 + len(self.tensors)  # the storage object itself
        return int(torch._C._storage_Use_Count(self.storage._cdata)) > own


@dataclass(slots=True, eq=False)
class _Moved:
    """Keeps a storage without memory, and its content."""

    storage: torch.UntypedStorage
    nbytes: int
    link: HostLink
    buffer: Tensor | None
    """Holds the content in host memory; None where the content does not matter."""
    copied: Pending = DONE


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor over the whole storage, with a separate version counter."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StateMover:
    """Moves the states of one engine to host memory and back.

    The tensor objects stay: their storages release their memory, as those of sharded units do, and get it
    back. So every view, and every parameter of the optimizer, is right again after a reload.

    Note [Shared memory]. A storage that the other ranks can read is not resized: the system takes its pages
    back, and gives new ones when it is written again.
    """

    def __init__(self, sharded: ShardedModel, step: ShardedOptimizer | None, config: Config) -> None:
        self._sharded = sharded
        self._reducer = sharded.reducer
        self._step = step
        self._zero = config.zero_optimization
        self._device = sharded.comm.device
        self.offloaded_states: set[str] = set()
        """Names the states that are off the device."""
        self._moved: dict[int, _Moved] = {}
        self._links: dict[bool, HostLink] = {}

    def move(self, include: Container[str] | None, device: Any, *, pin: bool, non_blocking: bool) -> None:
        """Move the states that ``include`` names, all for None, except those that are off the device already;
        see ``Engine.offload_states``.
        """
        names = _names(include) - self.offloaded_states
        self._check_allowed(device)
        if not names:
            return
        self._end_passes()
        offloaded = self.offloaded_states | names
        link = self._link(pin)
        chosen = [
            piece
            for key, piece in self._pieces().items()
            if key not in self._moved and piece.storage.nbytes() and piece.names <= offloaded
        ]
        # A view in the script would read released memory, which crashes a process on the CPU.
        kept = _still_viewed(chosen)
        leaving = [piece for piece in chosen if piece not in kept]
        # First, because the host may lack the memory: then nothing has changed.
        moved = self._copy_out(leaving, link)
        for unit in self._sharded.units:
            # Before the memory goes: from here on, each access is refused instead of reading what is
            # released.
            unit.offloaded_states = frozenset(offloaded)
            if VALUES in names and not unit.shard_params:
                unit.hide()
        self.offloaded_states = offloaded
        if not non_blocking:
            for each in moved:
                each.copied.wait()
        # With non_blocking, copies may still run here. download() has recorded their stream, so the memory is
        # used again only after they have read it.
        for each in moved:
            self._release(each)
        if BUFFERS in names:
            self._reducer.release_buffers()
        if kept:
            _complain(kept)
        if self._device.type == "cuda" and not non_blocking:
            # Other processes get memory that the allocator has given back, not what it keeps for later.
            torch.cuda.empty_cache()

    def reload(self, *, non_blocking: bool) -> None:
        """Copy all states back to the device; do nothing if there are none.

        Raises torch.OutOfMemoryError where the device lacks memory; what has come back stays, and a further
        call brings the remaining states.
        """
        if not self.offloaded_states:
            return
        coming: list[tuple[_Moved, Pending]] = []
        try:
            for key, moved in list(self._moved.items()):
                moved.copied.wait()
                if moved.storage.nbytes() != moved.nbytes:
                    moved.storage.resize_(moved.nbytes)
                # With a separate version counter: this must not look like a write of the script.
                target = _bytes_of(moved.storage)
                # After the allocation, which may fail: what is still listed comes with the next call.
                del self._moved[key]
                if moved.buffer is None:
                    target.zero_()
                else:
                    mark = moved.link.mark()
                    coming.append((moved, moved.link.upload(moved.buffer[: moved.nbytes], target, mark)))
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{error}\nzlaunch: out of memory in reload_states: free device memory, and call "
                "reload_states() again"
            ) from error
        finally:
            for moved, arrival in coming:
                arrival.wait()
                if not non_blocking:
                    arrival.synchronize()
                if moved.buffer is not None:
                    moved.link.give_back(moved.buffer)
        self.offloaded_states = set()
        for unit in self._sharded.units:
            unit.offloaded_states = frozenset()
            if unit.state is UnitState.AWAY:
                unit.show()
        if self._device.type == "cpu":  # nothing is gained by keeping it
            for link in self._links.values():
                link.pool.trim()

    def close(self) -> None:
        """Release the host memory. All states have to be on the device."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    # -- internals

    def _check_allowed(self, device: Any) -> None:
        """Raise ValueError for another device than the host, OffloadedError where the config offloads."""
        where = getattr(device, "value", getattr(device, "type", device))  # an enum, a torch.device or a name
        if where != "cpu":
            raise ValueError(f'engine.offload_states(device={where!r}): only "cpu" is supported')
        for key in ("offload_optimizer", "offload_param"):
            section = getattr(self._zero, key)
            if section is not None and section.device != "none":
                raise OffloadedError(
                    f"engine.offload_states() cannot be used with zero_optimization.{key}: those states are "
                    f"already offloaded (device {section.device}). Use only one of the two"
                )

    def _end_passes(self) -> None:
        """End all activity: nothing is gathered, reduced or stepped afterwards. Collective.

        Raises OffloadedError inside a pass of the model and where a parameter is being held.
        """
        sharded = self._sharded
        if sharded.is_in_pass:
            raise OffloadedError(
                "engine.offload_states() was called inside a forward or backward pass, or after one that "
                "raised: call it between two passes (engine.zero_grad() ends a failed pass)"
            )
        if self._step is not None:
            self._step.wait()
        sharded.reshard_all()
        for unit in sharded.units:
            if unit.state is UnitState.AWAY:
                continue
            if not unit.shard_params:
                unit.wait_unsharded()
            elif unit.state is not UnitState.SHARDED:
                raise OffloadedError(
                    f"engine.offload_states() was called while {unit.names[0]} is gathered: exit "
                    "GatheredParameters first"
                )
        # Other ranks may still read this rank's part of a gather.
        sharded.comm.drain()
        drop_copies(sharded.comm.link)

    def _link(self, pin: bool) -> HostLink:
        if pin not in self._links:
            ranks = max(1, read_environment().local_world_size)
            budget = int(PINNED_SHARE * host_bytes()) // ranks
            self._links[pin] = HostLink(self._device, pin=pin, budget_bytes=budget)
        return self._links[pin]

    def _pieces(self) -> dict[int, _Piece]:
        """Return every storage with states, by its identity."""
        found: dict[int, _Piece] = {}
        for name, tensor in self._tensors():
            if tensor.device == self._device:
                storage = tensor.untyped_storage()
                piece = found.setdefault(storage._cdata, _Piece(storage))
                piece.names.add(name)
                piece.tensors[id(tensor)] = tensor
        return found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the engine that lies on a state's memory."""
        for unit in self._sharded.units:
            if not unit.shard_params:
                yield from ((VALUES, tensor) for tensor in unit.value_tensors())
            elif unit.values.tensor is not None:
                yield VALUES, unit.values.tensor
            if unit.store is not None and unit.store.master is not None:
                yield MASTERS, unit.store.master
        yield from ((GRADIENTS, tensor) for tensor in self._reducer.tensors())
        if self._step is None:
            return
        for part in self._step.slices:
            if part.leaf is not None:
                yield MASTERS, part.leaf
        for value in self._step.optimizer.state.values():
            yield from ((OPTIMIZER, tensor) for tensor in _inside(value))

    def _copy_out(self, pieces: list[_Piece], link: HostLink) -> list[_Moved]:
        """Start to copy storages to host memory; all of them, or none."""
        moved: list[_Moved] = []
        try:
            for piece in pieces:
                nbytes = piece.storage.nbytes()
                # Between a step and the next backward pass, gradients are memory without content.
                matters = piece.names != {GRADIENTS} or self._reducer.passes > 0
                buffer = link.take(nbytes) if matters else None
                moved.append(each := _Moved(piece.storage, nbytes, link, buffer))
                if buffer is not None:
                    each.copied = link.download(_bytes_of(piece.storage), buffer[:nbytes])
        except BaseException:
            for each in moved:
                each.copied.wait()
                if each.buffer is not None:
                    link.give_back(each.buffer)
            raise
        return moved

    def _release(self, moved: _Moved) -> None:
        """Release a storage's memory. On a CPU one that NumPy has been given keeps it: no such storage can be
        resized.
        """
        # See Note [Shared memory]: release() takes what cannot be resized.
        if not self._sharded.comm.release(moved.storage) and moved.storage.resizable():
            moved.storage.resize_(0)
        self._moved[moved.storage._cdata] = moved


def _names(include: Container[Any] | None) -> set[str]:
    """Return the states that ``include`` has. Raises ValueError for anything else in it."""
    if include is None:
        return set(STATES)
    known = ", ".join(STATES)
    if isinstance(include, str):
        raise ValueError(f"engine.offload_states(include=...): expected a list of state names: {known}")
    if isinstance(include, Iterable):
        include = list(include)  # an iterator can be consumed only once
    elif not hasattr(include, "__contains__"):
        raise ValueError(
            f"engine.offload_states(include={include!r}): expected a list of state names: {known}"
        )
    unknown = [each for each in include if each not in STATES] if isinstance(include, list) else []
    if unknown:
        raise ValueError(f"engine.offload_states(include=...): {unknown[0]!r} is not one of {known}")
    return {name for name in STATES if name in include}


def _still_viewed(pieces: list[_Piece]) -> list[_Piece]:
    """Return the pieces that a tensor outside the engine still lies on after a short wait: a gloo thread
    drops what it has sent a moment after that has arrived.
    """
    viewed = [piece for piece in pieces if piece.is_viewed]
    deadline = time.monotonic() + _LET_GO_S
    while viewed and time.monotonic() < deadline:
        time.sleep(0.001)
        viewed = [piece for piece in viewed if piece.is_viewed]
    return viewed


def _complain(kept: list[_Piece]) -> None:
    nbytes = sum(piece.storage.nbytes() for piece in kept)
    names = ", ".join(sorted(set().union(*(piece.names for piece in kept))))
    warnings.warn(
        f"offload_states: {nbytes} bytes of {names} stay on the device, because the script has views of "
        "them (parameter.data, a detached parameter): delete those first",
        stacklevel=4,
    )


def _inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state entry that are worth moving.

    Raises OffloadedError for a class of tensors that share or wrap their memory.
    """
    if isinstance(value, dict):
        for each in value.values():
            yield from _inside(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _inside(each)
    elif isinstance(value, Tensor) and value.dim() and value.numel():
        if type(value) is not Tensor or value.layout is not torch.strided:
            raise OffloadedError(
                f"the optimizer's state has a tensor of class {type(value).__name__}, layout {value.layout}, "
                'which engine.offload_states() cannot move: remove "optim_states" from include'
            )
        yield value
