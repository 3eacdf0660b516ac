"""Runs collectives between the CPU ranks of one machine through memory that they all see.

Over gloo every byte passes through the loopback interface: copied into the kernel, out of it, and by threads
that compete with the computation for the cores. Here a rank reads the others' tensors where they are.

Note [Protocol]. Tensors that others may read lie in an arena: anonymous files (memfd) whose descriptors the
ranks pass to each other, so that nothing has a name that could be left behind. Two ranks are connected by a
socket, over which only tokens travel. A collective is: tell the others where my part is (READY), read each
other part once its token is there, and tell its owner (DONE). A rank's part may change again when all others
are DONE. Every call into this file does work: it reads all parts that have become ready, of any collective,
so that one rank seldom waits for another's next call. The sockets order memory accesses too: what was written
before a token was sent is visible to its receiver.
"""

from __future__ import annotations

import array
import mmap
import os
import selectors
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..errors import PeerLost, RankMismatchError
from .pending import Pending

# -- peer memory ------------------------------------------------------------------------------------
#
# Defines memory that CPU ranks share, through which collectives may go instead of the network.


Identity = tuple[int, int]
"""Identifies a collective: the number of a label; the elements of a rank's part, times 16, plus the bytes of
one element.
"""


# -- peer -------------------------------------------------------------------------------------------
#
# Represents another rank of this machine: a connection, and the memory that may be read.


_PAGE = mmap.PAGESIZE


class Chunk:
    """Maps one file, a part of an arena."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.memory = mmap.mmap(fd, nbytes)
        self.nbytes = nbytes
        self.used = 0

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def forget(self, offset: int, nbytes: int) -> None:
        """Unmap another rank's pages from this process: they stay where they are, and no longer count as
        memory of this process too.
        """
        start = offset // _PAGE * _PAGE
        stop = -(-(offset + nbytes) // _PAGE) * _PAGE
        self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Peer:
    """Represents the other end of one connection."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.chunks: dict[int, Chunk] = {}
        self.ready: dict[tuple[int, int], tuple[int, int, Identity]] = {}
        """Maps a collective (channel, sequence number) to where this peer's part is, chunk and offset, and to
        what it is about.
        """
        self.gone = False


# -- memory -----------------------------------------------------------------------------------------


CHUNK_BYTES = 1 << 30
"""Sets the address space by which the arena grows at a time; only pages that are written take memory."""
_MESSAGE = struct.Struct("<cBQQQIQ")
"""Packs kind, channel, sequence number, chunk, offset in bytes (for CHUNK: its size), label, elements."""
_READY = b"R"
_DONE = b"D"
_CHUNK = b"C"
_LOOK_S = 1.0
"""Sets how often a waiting rank asks whether it waits in vain."""


class PeerTransfer(Pending):
    """Represents one collective under way on this rank."""

    def __init__(
        self,
        shared: SharedMemory,
        key: tuple[int, int],
        peers: Sequence[Peer],
        read: Callable[[Peer, int, int], None],
        identity: Identity,
        *,
        exclusive: bool,
        then: Callable[[], PeerTransfer] | None,
    ) -> None:
        self._shared = shared
        self.key = key
        self._read = read
        self._then = then
        self.identity = identity
        self._exclusive = exclusive
        """Tells whether this rank's part may change once the transfer has been waited for."""
        self.unread = list(peers)
        """Lists peers whose part is still to be read, in the order in which it must be."""
        self.readers = {peer.rank for peer in peers}
        """Lists peers that may still read this rank's part."""
        self._next: PeerTransfer | None = None

    def advance(self) -> None:
        """Read what is ready."""
        if not self.unread:
            return
        while self.unread:
            # In the fixed order, even if a later peer is ready: the order of summation decides the bits of
            # the result.
            peer = self.unread[0]
            if self.key not in peer.ready:
                return
            chunk, offset, _ = peer.ready.pop(self.key)
            self._read(peer, chunk, offset)
            self.unread.pop(0)
            # After the read: the owner waits for this before it changes its part.
            self._shared.tell(peer, _DONE, self.key)
        if self._then is not None:
            self._next = self._then()

    def awaited(self) -> set[int]:
        """Return the ranks whose part has not been announced. A rank may announce its part and end."""
        return {peer.rank for peer in self.unread if self.key not in peer.ready}

    @property
    def ready(self) -> bool:
        """Tell whether :meth:`wait` would not wait. Raises PeerLost."""
        self._shared.progress()
        if self._next is not None:
            return self._next.ready
        self._shared.check_peers(self.awaited())
        return not self.unread and not (self._exclusive and self._shared.present(self.readers))

    def wait(self) -> None:
        """Wait until this rank's result is complete, and no other reads this one's part if that matters."""
        self._shared.drive(self.awaited)
        if self._next is not None:
            self._next.wait()
        elif self._exclusive:
            self._shared.drive(lambda: self._shared.present(self.readers))


class SharedMemory:
    """Connects the ranks of one machine; keeps their arenas and the collectives under way between them.

    See Note [Protocol]. All ranks must start the collectives of one channel in one order.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        timeout_s: float,
        describe: Callable[[int, Identity], str],
        check: Callable[[], None],
        first: int = 0,
    ) -> None:
        """Join the ranks; ``describe(channel, identity)`` names a collective; ``check`` is called regularly
        while this rank waits, and may raise. Messages count the ranks from ``first``.
        """
        self._first = first
        self._describe = describe
        self._check = check
        self.rank = rank
        self.world_size = len(connections) + 1
        self._timeout_s = timeout_s
        self._peers = {other: Peer(other, connections[other]) for other in sorted(connections)}
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._chunks: list[Chunk] = []
        self._places: dict[int, tuple[int, int]] = {}
        """Maps the address of a tensor's storage in this rank's arena to chunk and offset."""
        self.started: dict[int, int] = {}
        """Counts the collectives of each channel that have been started."""
        self._transfers: dict[tuple[int, int], PeerTransfer] = {}

    # -- memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor that the other ranks can read. Its memory lives as long as this object."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        # Whole pages: release() punches a hole, in which no other tensor may lie.
        nbytes = -(-numel * dtype.itemsize // _PAGE) * _PAGE
        if not self._chunks or self._chunks[-1].used + nbytes > self._chunks[-1].nbytes:
            self._grow(max(CHUNK_BYTES, nbytes))
        chunk = self._chunks[-1]
        tensor = chunk.tensor(chunk.used, numel, dtype)
        self._places[tensor.untyped_storage().data_ptr()] = len(self._chunks) - 1, chunk.used
        chunk.used += nbytes
        return tensor

    def release(self, storage: torch.UntypedStorage) -> bool:
        """Release the pages under a tensor from :meth:`empty` to the system: it reads as zeros until it is
        written again. Returns False for other memory. No rank may be reading it.
        """
        place = self._places.get(storage.data_ptr())
        if place is None:
            return False
        nbytes = -(-storage.nbytes() // _PAGE) * _PAGE
        self._chunks[place[0]].memory.madvise(mmap.MADV_REMOVE, place[1], nbytes)
        return True

    def _grow(self, nbytes: int) -> None:
        fd = os.memfd_create("zlaunch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            for peer in self._peers.values():
                # A socket keeps the order: a peer maps the file before it hears of a part in it.
                self.tell(peer, _CHUNK, (0, 0), len(self._chunks), nbytes, fd)
            self._chunks.append(Chunk(fd, nbytes))
        finally:
            os.close(fd)

    def _place_of(self, tensor: Tensor) -> tuple[int, int]:
        place = self._places.get(tensor.untyped_storage().data_ptr())
        assert place is not None, "the tensor does not come from SharedMemory.empty"
        return place[0], place[1] + int(tensor.storage_offset()) * tensor.itemsize

    # -- collectives

    def all_gather(self, channel: int, full: Tensor, source: Tensor, label: int = 0) -> PeerTransfer:
        """Start to fill the other ranks' slices of ``full`` (w * s elements) from their ``source`` (s
        elements, shared, of any floating dtype). This rank's own slice is the caller's to fill; ``source``
        must not change before :meth:`drain`.
        """
        return self._gather(self._key(channel), full, source, label, exclusive=False)

    def _gather(
        self, key: tuple[int, int], full: Tensor, source: Tensor, label: int, exclusive: bool
    ) -> PeerTransfer:
        numel = source.numel()
        dtype = source.dtype

        def read(peer: Peer, chunk: int, offset: int) -> None:
            part = peer.chunks[chunk].tensor(offset, numel, dtype)
            full[peer.rank * numel : (peer.rank + 1) * numel].copy_(part)
            peer.chunks[chunk].forget(offset, part.nbytes)

        return self._begin(key, source, read, (label, numel << 4 | dtype.itemsize), exclusive)

    def reduce_scatter(self, channel: int, shard: Tensor, bucket: Tensor, label: int = 0) -> PeerTransfer:
        """Start to fill ``shard`` with this rank's slice of the sum over ranks of ``bucket`` (w * s, shared).

        It may be this rank's slice of the bucket itself. The order of summation is fixed: this rank's part
        first, then the others by rank.
        """
        return self._reduce(self._key(channel), shard, bucket, label)

    def _reduce(
        self,
        key: tuple[int, int],
        shard: Tensor,
        bucket: Tensor,
        label: int,
        then: Callable[[], PeerTransfer] | None = None,
    ) -> PeerTransfer:
        numel = shard.numel()
        dtype = bucket.dtype
        start = self.rank * shard.numel()
        own = bucket[start : start + numel]
        in_place = own.data_ptr() == shard.data_ptr()
        todo: list[Tensor] = [] if in_place else [own]
        """Holds this rank's part, added together with the first of the others."""

        def read(peer: Peer, chunk: int, offset: int) -> None:
            offset += start * dtype.itemsize
            part = peer.chunks[chunk].tensor(offset, numel, dtype)
            if not todo:
                shard.add_(part)
            elif shard.dtype == dtype:
                torch.add(todo.pop(), part, out=shard)
            else:
                shard.copy_(todo.pop()).add_(part)
            peer.chunks[chunk].forget(offset, part.nbytes)

        return self._begin(key, bucket, read, (label, numel << 4 | dtype.itemsize), True, then)

    def all_reduce(self, channel: int, tensor: Tensor, label: int = 0) -> PeerTransfer:
        """Start to sum ``tensor`` (w * s elements, shared) over the ranks, in place."""
        numel = tensor.numel() // self.world_size
        assert numel * self.world_size == tensor.numel()
        own = tensor[self.rank * numel : (self.rank + 1) * numel]
        key = self._key(channel)
        # The second half has a separate channel with the same number. It overwrites the other ranks' slices
        # of `tensor`. That is safe: a peer announces its sum after it has read its slice of all ranks' parts,
        # so nobody reads the slice that is overwritten here.
        second = (key[0] | 128, key[1])
        return self._reduce(
            key, own, tensor, label, lambda: self._gather(second, tensor, own, label, exclusive=True)
        )

    def _key(self, channel: int) -> tuple[int, int]:
        number = self.started.get(channel, 0)
        self.started[channel] = number + 1
        return channel, number

    def _begin(
        self,
        key: tuple[int, int],
        source: Tensor,
        read: Callable[[Peer, int, int], None],
        identity: Identity,
        exclusive: bool,
        then: Callable[[], PeerTransfer] | None = None,
    ) -> PeerTransfer:
        peers = list(self._peers.values())
        transfer = PeerTransfer(self, key, peers, read, identity, exclusive=exclusive, then=then)
        # Before the first token: tell() receives while a socket is full, and a DONE finds its transfer here.
        self._transfers[key] = transfer
        place = self._place_of(source)
        for peer in peers:
            self.tell(peer, _READY, key, *place, identity=identity)
        # Also of peers that were ready before: a mismatch is raised before anything is read.
        for peer in peers:
            self._compare(peer, key)
        self.progress()
        return transfer

    def _compare(self, peer: Peer, key: tuple[int, int]) -> None:
        """Raise RankMismatchError if a peer's part of a collective is about something else."""
        if key not in self._transfers or key not in peer.ready:
            return
        mine = self._transfers[key].identity
        other = peer.ready[key][2]
        if mine != other:
            raise RankMismatchError(
                f"rank {self._first + peer.rank} {self._describe(key[0], other)}, while rank "
                f"{self._first + self.rank} {self._describe(key[0], mine)}: all ranks must use the same "
                "modules in the same order, and call state_dict, evaluation and saving together"
            )

    # -- tokens

    def tell(
        self,
        peer: Peer,
        kind: bytes,
        key: tuple[int, int],
        chunk: int = 0,
        offset: int = 0,
        fd: int = -1,
        identity: Identity = (0, 0),
    ) -> None:
        """Send one message; drop one to a rank that has ended."""
        message = _MESSAGE.pack(kind, *key, chunk, offset, *identity)
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        while not peer.gone:
            try:
                peer.connection.sendmsg([message], extra)
                return
            except BlockingIOError:
                # The peer's queue is full; it may be waiting for room in ours.
                self._receive()
                time.sleep(0.0005)
            except OSError:
                return  # it has ended; what it sent before is still to be received

    def _receive(self) -> None:
        for peer in self._peers.values():
            while not peer.gone:
                try:
                    message, extra, _, _ = peer.connection.recvmsg(_MESSAGE.size, socket.CMSG_SPACE(4))
                except BlockingIOError:
                    break
                except ConnectionResetError:
                    continue  # it ended with messages of ours unread; its own may still be here
                except OSError:
                    message = b""
                if not message:
                    peer.gone = True
                    if peer.connection.fileno() >= 0:
                        self._selector.unregister(peer.connection)
                    break
                kind, channel, number, chunk, offset, label, numel = _MESSAGE.unpack(message)
                if kind == _READY:
                    peer.ready[channel, number] = chunk, offset, (label, numel)
                    self._compare(peer, (channel, number))
                elif kind == _DONE:
                    self._transfers[channel, number].readers.discard(peer.rank)
                else:
                    (fd,) = struct.unpack("i", extra[0][2])
                    peer.chunks[chunk] = Chunk(fd, offset)
                    os.close(fd)

    def progress(self) -> None:
        """Receive what has arrived and read every part that is ready, without waiting."""
        self._receive()
        for transfer in list(self._transfers.values()):
            transfer.advance()
        finished = [key for key, t in self._transfers.items() if not t.unread and not t.readers]
        for key in finished:
            del self._transfers[key]

    def drive(self, missing: Callable[[], set[int]]) -> None:
        """Advance the collectives until ``missing()`` names no rank. Raises PeerLost."""
        self.progress()
        deadline = time.monotonic() + self._timeout_s
        while missing():
            self.check_peers(missing())
            left = deadline - time.monotonic()
            if left <= 0:
                other = self._first + min(missing())
                raise PeerLost(
                    f"rank {self._first + self.rank} has waited {self._timeout_s:.0f} s for rank {other}, "
                    "which has not joined the same all-gather or reduction"
                )
            self._check()
            if missing():  # the check may have received what would have ended the wait
                self._selector.select(min(left, _LOOK_S))
            self.progress()

    def check_peers(self, ranks: set[int]) -> None:
        """Raise PeerLost if one of ``ranks``, which this rank waits for, has ended."""
        gone = [rank for rank in ranks if self._peers[rank].gone]
        if gone:
            lost = self._first + gone[0]
            mine = self._first + self.rank
            raise PeerLost(f"rank {lost} exited while rank {mine} needs its tensors")

    def present(self, ranks: set[int]) -> set[int]:
        """Return those of ``ranks`` that have not ended: a rank that has ended reads nothing any more."""
        return {rank for rank in ranks if not self._peers[rank].gone}

    def drain(self) -> None:
        """Wait until every collective that was started is over for all ranks: sources may change.

        All ranks must call it, or start equal collectives and wait for them.
        """

        def missing() -> set[int]:
            found: set[int] = set()
            for transfer in self._transfers.values():
                found |= transfer.awaited()
                found |= self.present(transfer.readers)
            return found

        self.drive(missing)

    def close(self) -> None:
        """Close the connections. Tensors that are still in use keep their memory."""
        self._selector.close()
        for peer in self._peers.values():
            peer.connection.close()
            peer.gone = True


# -- connect ----------------------------------------------------------------------------------------
#
# Connects the ranks of one machine to each other.


def _place() -> tuple[object, ...]:
    """Return a value that is equal in two processes that can share memory and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Abstract socket names belong to a network namespace; the process ids that are compared below to a PID
    # namespace.
    return boot, os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/self/ns/pid").st_ino, os.getuid()


def connect(
    rank: int,
    world_size: int,
    exchange: Callable[[object], list[object]],
    timeout_s: float,
    allowed: bool,
    describe: Callable[[int, Identity], str],
    check: Callable[[], None],
    first: int = 0,
) -> SharedMemory | None:
    """Connect all ranks of a group, or return None on every rank where they cannot share memory. Collective.

    ``exchange`` returns every rank's value, in rank order. ``rank`` counts in the group, whose ``first`` rank
    messages count from.
    """
    listener = None
    offer: object = None
    if allowed and hasattr(os, "memfd_create"):
        with suppress(OSError):
            # A system may forbid memfd; then all ranks use gloo.
            os.close(os.memfd_create("zlaunch", os.MFD_CLOEXEC))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            name = f"zlaunch-{uuid.uuid4().hex}"
            listener.bind("\0" + name)  # an abstract name: it vanishes with the socket
            # Before the offer: the others connect as soon as they have it.
            listener.listen(world_size)
            offer = (_place(), name, os.getpid())
    offers = exchange(offer)
    if any(other is None or other[0] != offers[0][0] for other in offers):  # type: ignore[index]
        if listener is not None:
            listener.close()
        return None
    assert listener is not None
    pids = {other[2]: position for position, other in enumerate(offers)}  # type: ignore[index]
    connections: dict[int, socket.socket] = {}
    with listener:
        for other in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect("\0" + offers[other][1])  # type: ignore[index]
            connections[other] = connection
        listener.settimeout(timeout_s)
        while len(connections) < world_size - 1:
            connection, _ = listener.accept()
            pid, _, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if pids.get(pid, -1) > rank:
                connections[pids[pid]] = connection
            else:
                connection.close()  # a stranger who has seen the name
    return SharedMemory(rank, connections, timeout_s, describe, check, first)
