"""Track blocks of memory, which code reads and writes which bytes of them, and when they are given back."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .clocks import MAIN, Actor, clocks, findings, host, join, known, lock, tick, where
from .streams import Stream, current_stream, note_device
from .timeline import timeline

without_modes = torch._C.DisableTorchFunction
_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]  # torch's stubs lack it
"""Gives what `untyped_storage()._cdata` is, past all modes: it is asked for ten times an operation."""
_MOST = 400
"""Accesses that are remembered of a block."""


@dataclass(slots=True)
class Access:
    """One operation's touch of a range of bytes."""

    start: int
    stop: int
    actor: Actor
    count: int
    writes: bool
    text: str

    def overlaps(self, start: int, stop: int) -> bool:
        """Tell whether any byte is in the range."""
        return self.start < stop and start < self.stop


@dataclass(slots=True)
class Block:
    """The memory of one storage."""

    on_device: bool
    stream: Stream
    """Whose it is for the allocator: given back, it is used again by this stream without a wait."""
    born: str
    pinned_by_torch: bool = False
    """torch's allocator of page-locked memory waits itself for the copies before it lends it again."""
    address: int = 0
    nbytes: int = 0
    users: set[Actor] = field(default_factory=set)
    """Streams that `record_stream` has named."""
    accesses: list[Access] = field(default_factory=list)


blocks: dict[int, Block] = {}
locked: dict[int, int] = {}
"""Address -> bytes of what cudaHostRegister has locked."""


def key_of(tensor: Tensor) -> int:
    """Return a number of a tensor's storage."""
    return _storage_id(tensor)


def block_of(tensor: Tensor, on_device: bool = False) -> Block:
    """Return the memory of a tensor, which is new here if nobody has seen it."""
    key = key_of(tensor)
    block = blocks.get(key)
    if block is None:
        with without_modes():
            storage = tensor.untyped_storage()
        block = _watch(storage, key, on_device)
    return block


def _watch(storage: torch.UntypedStorage, key: int, on_device: bool) -> Block:
    block = blocks[key] = Block(on_device, current_stream(), where())
    block.address, block.nbytes = storage.data_ptr(), storage.nbytes()
    weakref.finalize(storage, _gone, key, block).atexit = False
    return block


def _gone(key: int, block: Block) -> None:
    with lock:
        if blocks.get(key) is block:
            del blocks[key]
        _check_given_back(block)


def allocate(block: Block) -> None:
    """Note that device memory comes from the allocator: what its stream has queued so far may still use it
    for its former owner. To other streams that is a write of all bytes which they have to come after.
    """
    actor = block.stream.actor
    count = clocks[actor].get(actor, 0)
    _touch(block, Access(0, block.nbytes, actor, count, True, f"its former owner, before {where()}"))


def is_on_device(tensor: Tensor) -> bool:
    """Tell whether a tensor says that it is on the GPU."""
    block = blocks.get(key_of(tensor))
    return block is not None and block.on_device


def allocated() -> int:
    """Return the bytes of device memory that are in use."""
    return sum(block.nbytes for block in list(blocks.values()) if block.on_device)


def is_page_locked(tensor: Tensor) -> bool:
    """Tell whether copies of a host tensor can go on without the host."""
    if block_of(tensor).pinned_by_torch:
        return True
    with without_modes():
        address = tensor.data_ptr()
    return any(start <= address < start + count for start, count in list(locked.items()))


def _check_given_back(block: Block) -> None:
    """Look for accesses that the memory's next owner cannot know to have ended."""
    dropping = _dropping_thread()
    seen = dict(clocks[block.stream.actor] if block.on_device else clocks[dropping])
    join(seen, clocks[dropping])
    for access in block.accesses:
        if block.pinned_by_torch or access.actor in block.users:
            continue
        if access.actor[0] == "host" and not block.on_device:
            continue
        if not known(seen, access.actor, access.count):
            kind = "device" if block.on_device else "host"
            findings.races[
                f"GIVEN BACK TOO EARLY in {where()}: {kind} memory of {block.born}, used by {access.text}"
            ] += 1
    block.accesses = []


def _dropping_thread() -> Actor:
    """Return who gives memory back: the main thread, where one of gloo's has only held it a little longer."""
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return MAIN if foreign else host()


def resized(storage: Any, nbytes: int) -> None:
    """Note that a storage is about to change its memory."""
    with lock:
        key = storage._cdata
        block = blocks.get(key) or _watch(storage, key, True)
        if nbytes == 0 or nbytes != storage.nbytes():
            _check_given_back(block)
        block.nbytes = nbytes
        if nbytes:
            block.stream, block.users, block.born = current_stream(), set(), where()
            allocate(block)


def launch(name: str, reads: list[Tensor], writes: list[Tensor], actor: Actor) -> None:
    """Note an operation of a stream, which the calling thread asks for, or of that thread itself."""
    text = f"{name} ({where(2)})"
    with lock:
        if actor != host():
            note_device()
            join(clocks[actor], clocks[host()])
        timeline.launched(actor, name, reads, writes)
        count = tick(actor)
        for tensors, does_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                span = _span(tensor)
                if span is not None:
                    _touch(block_of(tensor), Access(*span, actor, count, does_write, text))


def touch_bytes(name: str, address: int, nbytes: int, *, writes: bool, actor: Actor | None = None) -> None:
    """Note that the calling thread, or a stream, reads or writes memory without an operation of torch's."""
    who = actor or host()
    with lock:
        count = tick(who)
        for block in list(blocks.values()):  # one may go meanwhile
            start = address - block.address
            if block.on_device == (actor is not None) and 0 <= start < block.nbytes:
                text = f"{name} ({where(2)})"
                _touch(block, Access(start, start + nbytes, who, count, writes, text))


def _span(tensor: Tensor) -> tuple[int, int] | None:
    with without_modes():
        if tensor.numel() == 0:
            return None
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        if tensor.is_contiguous():
            return start, start + tensor.numel() * size
        last = sum(int(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * size


def _touch(block: Block, new: Access) -> None:
    clock, kept = clocks[new.actor], []
    for old in block.accesses:
        over = old.overlaps(new.start, new.stop)
        if over and (new.writes or old.writes) and not known(clock, old.actor, old.count):
            kind = "device" if block.on_device else "host"
            doing = ("read", "write")
            findings.races[
                f"RACE in {kind} memory of {block.born}: {doing[new.writes]} by {new.text}, "
                f"{doing[old.writes]} by {old.text}"
            ] += 1
        covered = new.start <= old.start and old.stop <= new.stop
        if covered and (new.writes or (not old.writes and old.actor == new.actor)):
            continue
        kept.append(old)
    block.accesses = [*kept, new][-_MOST:]
