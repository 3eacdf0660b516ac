"""Keeps the inputs of checkpointed calls until the backward pass: as they are, sliced, or in host memory.

Note [Offloading on a GPU]
    Copies run on one separate stream, so a buffer of host memory can be lent again at once: its next copy
    comes after its last one in stream order. Forward: the input of call i is copied out behind the work that
    made it, and its memory on the device is let go when call i+1 offloads its input; the compute stream waits
    for the copy first. (So the last input, which the backward pass needs at once, never leaves.) Backward:
    when the inputs of call i are taken, those of call i-1 begin to come back, into memory of the compute
    stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...cuda_ops.pinned import PinnedPool
from ..comm.link import all_gather_flat

MINIMUM_NUMEL = 1024
"""Smaller tensors are not moved: that would cost more than keeping them."""
offload_cpu_tensors = False
"""Copy tensors that are in host memory already, too: for tests without a GPU."""


@dataclass(slots=True)
class ActivationPlacement:
    """Says how large inputs are kept."""

    in_cpu: bool = False
    partition: bool = False
    mpu: Any = None
    """The model-parallel unit, which knows the ranks that hold equal activations."""
    replicated: bool = False
    """Tells whether the first sliced tensor was found equal on all of these ranks."""

    def group(self) -> Any:
        """Return the group of ranks to spread inputs over, None if there are not several."""
        if not self.partition or self.mpu is None:
            return None
        group = group_getter(self.mpu)()
        return group if dist.get_world_size(group) > 1 else None


def group_getter(mpu: Any) -> Callable[[], Any]:
    """Return the method that gives a model-parallel unit's process group. Raises TypeError if it has none."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        getter = getattr(mpu, name, None)
        if callable(getter):
            return getter  # type: ignore[no-any-return]
    raise TypeError(f"mpu_: {type(mpu).__name__} has no get_model_parallel_group()")


@dataclass(frozen=True, slots=True)
class Kept:
    """Holds one input."""

    source: Tensor | OffloadedTensor
    """The input, its slice, or the offloaded one of them."""
    version: int | None = None
    """Version of an input that is kept as it is: it must not be modified until it is taken."""
    shape: torch.Size | None = None
    """Shape of the whole tensor, if a slice is kept."""


class Segment:
    """Holds what one checkpointed call keeps."""

    def __init__(self, place: ActivationPlacement) -> None:
        self.offloaded: list[OffloadedTensor] = []
        self.before: weakref.ref[Segment] | None = None
        """The segment that was offloaded before this one; its backward pass comes after."""
        self._place = place
        self._group = place.group()

    def keep(self, x: Tensor) -> Kept:
        """Keep ``x`` for the backward pass. Collective over the model-parallel group if there is one."""
        # A parameter lives on anyway, and ZeRO owns its storage. An expanded tensor would grow.
        if type(x) is not Tensor:
            return Kept(x, version=x._version)
        if (
            x.layout != torch.strided
            or not x.is_floating_point()
            or x.numel() < MINIMUM_NUMEL
            or x.untyped_storage().nbytes() < x.nbytes
        ):
            return Kept(x.detach(), version=x._version)
        piece = x
        shape = None
        if self._group is not None:
            piece = self._slice_of(x)
            shape = x.shape
        if self._place.in_cpu and (x.is_cuda or offload_cpu_tensors):
            return Kept(self._offload(piece), shape=shape)
        if shape is not None:
            return Kept(piece, shape=shape)
        return Kept(x.detach(), version=x._version)

    def take(self, kept: Kept) -> Tensor:
        """Return what was kept, and start to fetch what the segment before needs. Collective like ``keep``.

        Raises RuntimeError if it was modified in place meanwhile.
        """
        x = kept.source.take() if isinstance(kept.source, OffloadedTensor) else kept.source
        before = self.before() if self.before is not None else None
        if before is not None:
            for earlier in before.offloaded:
                earlier.fetch()
        if kept.version is not None:
            _check_version(x, kept.version)
        return x if kept.shape is None else _whole_of(x, kept.shape, self._group)

    def _offload(self, x: Tensor) -> OffloadedTensor:
        if x.device not in _rooms:
            _rooms[x.device] = _OffloadRoom(x.device)
        room = _rooms[x.device]
        last = room.last() if room.last is not None else None
        if last is not self:
            if last is not None:
                for earlier in last.offloaded:
                    earlier.let_go()
            self.before = room.last
            room.last = weakref.ref(self)
        offloaded = room.offload(x)
        offloaded.users += 1
        self.offloaded.append(offloaded)
        return offloaded

    def _slice_of(self, x: Tensor) -> Tensor:
        """Copy this rank's n-th part of ``x``, flat, padded to equal sizes on all ranks.

        Raises RuntimeError on every rank of the group if the first such tensor differs between them:
        gathering slices of different tensors would give wrong gradients.
        """
        group = self._group
        flat = x.detach().reshape(-1)
        share = -(-flat.numel() // dist.get_world_size(group))
        rank = dist.get_rank(group)
        own = flat[rank * share : (rank + 1) * share]
        piece = flat.new_zeros(share)
        piece[: own.numel()].copy_(own)
        if not self._place.replicated:
            gathered = _whole_of(piece, flat.shape, group)
            same = torch.equal(gathered.view(torch.uint8), flat.view(torch.uint8))
            everywhere = torch.tensor([float(same)], device=x.device)
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
            if not everywhere.item():
                raise RuntimeError(
                    "partition_activations needs equal inputs on all model-parallel ranks, but an input of "
                    f"shape {tuple(x.shape)} differs"
                )
            self._place.replicated = True
        return piece


def _whole_of(piece: Tensor, shape: torch.Size, group: Any) -> Tensor:
    """Gather the tensor of which every rank of the group gives its slice; contiguous. Collective."""
    full = piece.new_empty(piece.numel() * dist.get_world_size(group))
    all_gather_flat(full, piece, group=group)
    return full[: shape.numel()].view(shape)


def _check_version(x: Tensor, version: int) -> None:
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} was modified in place after it was passed to a "
            "checkpointed function, which needs it again: clone it first"
        )


class _OffloadRoom:
    """Holds host memory and a stream for the tensors of one device. See Note [Offloading on a GPU]."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pool = PinnedPool(pin=self.stream is not None)
        self.returned: deque[Tensor] = deque()
        """Buffers of tensors that are gone; the garbage collector adds to them at any time."""
        self.last: weakref.ref[Segment] | None = None
        self._known: Any = WeakTensorKeyDictionary()

    def offload(self, x: Tensor) -> OffloadedTensor:
        """Start to copy ``x`` out; a tensor that several calls share (a mask) is copied once."""
        known = self._known.get(x)
        offloaded: OffloadedTensor | None = known() if known is not None else None
        if offloaded is None or offloaded.version != x._version:
            self._take_back()
            offloaded = OffloadedTensor(x.detach(), self)
            self._known[x] = weakref.ref(offloaded)
        return offloaded

    def _take_back(self) -> None:
        while self.returned:
            self.pool.give_back(self.returned.pop())

    def trim(self) -> None:
        """Give host memory that holds no offloaded tensor back to the system."""
        if self.stream is not None:
            self.stream.synchronize()
        self._take_back()
        self.pool.trim()


_rooms: dict[torch.device, _OffloadRoom] = {}


def trim() -> None:
    """Give host memory that holds no offloaded tensor back to the system."""
    for room in _rooms.values():
        room.trim()


class OffloadedTensor:
    """Holds one tensor in host memory, and a copy on the device while it goes and comes."""

    def __init__(self, x: Tensor, room: _OffloadRoom) -> None:
        self.version = x._version
        self.users = 0
        """Calls that have not taken the tensor yet."""
        self._device = x.device
        self._room = room
        self._held: Tensor | None = x
        self._fetched: Tensor | None = None
        self._buffer = room.pool.take(x.nbytes)
        flat = self._buffer[: x.nbytes].view(x.dtype)
        self._host = flat.as_strided(x.shape, torch.empty_like(x, device="meta").stride())
        self._copied = self._copy(self._host, x)

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):
            self._room.returned.append(self._buffer)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy and return the event of its end."""
        stream = self._room.stream
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def _await_copy(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def let_go(self) -> None:
        """Keep only the copy in host memory. Raises RuntimeError if the tensor was changed meanwhile."""
        if self._held is not None:
            _check_version(self._held, self.version)
            self._await_copy()
            self._held = None

    def fetch(self) -> None:
        """Start to copy the tensor back, unless it is on the device."""
        if self._held is None and self._fetched is None:
            self._bring()

    def _bring(self) -> Tensor:
        fetched = self._fetched = torch.empty_like(self._host, device=self._device)
        self._copied = self._copy(fetched, self._host)
        if self._room.stream is not None:
            fetched.record_stream(self._room.stream)  # it may be dropped before anyone waits for the copy
        return fetched

    def take(self) -> Tensor:
        """Return the tensor for use on the current stream; calls that share it find it on the device."""
        self.users -= 1
        if self._held is not None:
            held = self._held
            self.let_go()
            return held
        fetched = self._fetched if self._fetched is not None else self._bring()
        self._await_copy()
        if self.users <= 0:
            self._fetched = None
        return fetched
