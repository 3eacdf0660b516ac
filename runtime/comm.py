"""Collectives: the only seam between the runtime and torch.distributed.

Every call counts the elements it moves, so that a test can hold the runtime to its promised volume. An
all-gather or reduce-scatter of a buffer of n elements counts n, an all-reduce 2n (it is one of each).
"""

from __future__ import annotations

import gc
import itertools
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from .deadlock import Key, watch
from .environment import read_environment
from .errors import RankMismatchError
from .shared_memory import Identity, SharedMemory, connect


class Pending(Protocol):
    """Something under way; ``wait`` returns when its result may be used (on the current stream for NCCL)."""

    def wait(self) -> None: ...


Exchange = Callable[[object], "list[Any]"]
"""Gives every rank's picklable value, in rank order. Collective."""


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _await(work: Any, key: Key, what: str) -> None:
    """Wait for a torch Work; where that blocks the host, say so and look whether it is in vain."""
    if work is None or work.is_completed():
        if work is not None:
            work.wait()
        return
    with watch.waiting(key, what):
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
                watch.check()
                if work.is_completed():  # since then, or because the group's own limit is over
                    work.wait()
                    return


class _Work:
    """Waits for a torch Work and keeps its tensors alive until then."""

    __slots__ = ("_keep", "_key", "_what", "_work")

    def __init__(self, work: Any, key: Key, what: str, *keep: Tensor) -> None:
        self._work, self._key, self._what, self._keep = work, key, what, keep

    def wait(self) -> None:
        if self._work is None:
            return
        if self._keep and self._keep[0].device.type != "cpu":
            self._work.wait()  # the stream waits, not the host
        else:
            _await(self._work, self._key, self._what)
        self._work, self._keep = None, ()


class _Noted:
    """A transfer through shared memory, whose wait is noted for the watch."""

    __slots__ = ("_key", "_transfer", "_what")

    def __init__(self, transfer: Pending, key: Key, what: str) -> None:
        self._transfer, self._key, self._what = transfer, key, what

    def wait(self) -> None:
        with watch.waiting(self._key, self._what):
            self._transfer.wait()


class _Sum:
    """A reduce-scatter under way: received pieces are summed into the shard when it is waited for."""

    __slots__ = ("_bucket", "_first", "_pieces", "_shard", "_work")

    def __init__(self, work: _Work, shard: Tensor, pieces: Tensor, bucket: Tensor, first: int = 0) -> None:
        self._work, self._shard, self._pieces, self._bucket = work, shard, pieces, bucket
        self._first = first

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        sum_pieces(self._shard, self._pieces, self._first)
        self._work = self._pieces = self._bucket = None  # type: ignore[assignment]


def sum_pieces(shard: Tensor, pieces: Tensor, first: int) -> None:
    """``shard`` (s elements, any dtype) becomes the sum over axis 0 of ``pieces`` (n, s).

    Row ``first`` comes before the others: the order that sums in shared memory have, too.
    """
    rows = [pieces[first], *(pieces[i] for i in range(pieces.shape[0]) if i != first)]
    if len(rows) >= 2 and pieces.dtype == shard.dtype:
        torch.add(rows[0], rows[1], out=shard)
        rest = rows[2:]
    else:
        shard.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        shard.add_(row)


_GATHER, _REDUCE = 0, 1
"""Channels: collectives of one kind are issued in one order on all ranks."""
_CHANNELS = ("gather", "reduce")
_VERBS = {_GATHER: "gathers", _REDUCE: "reduces the gradients of"}
_TIMEOUT_S = 1800.0
_LOOK = timedelta(seconds=1)
_REMEMBERED = 4096
"""Collectives whose order is kept, to name the first that differs between the ranks."""
_HASH_BITS = 12
_CHANNEL_TIMEOUT = timedelta(hours=12)
"""One rank may write to a slow disk for long while the others wait for it."""

_open: WeakSet[Comm] = WeakSet()
_dropped: dict[int, tuple[SharedMemory | None, list[Any]]] = {}
"""What communicators have left that nobody closed, by their numbers."""
_numbers = itertools.count()
_MASK = (1 << _HASH_BITS) - 1
_PRIME = 16_777_213  # below 2 ** (2 * _HASH_BITS)


def _say(labels: Sequence[str], channel: int, identity: Identity) -> str:
    label, size = identity
    known = label < len(labels)
    name = labels[label] if known else "a part of the model that this rank does not have"
    return f"{_VERBS[channel & 127]} {name} ({size >> 4} elements of {size & 15} bytes)"


def _drop(number: int, shared: SharedMemory | None, groups: list[Any]) -> None:
    _dropped[number] = shared, groups


def _close_dropped(exchange: Exchange) -> None:
    """Release what dropped engines have left, once all ranks have dropped them: the collector of cycles finds
    them at another time on each rank. Collective.
    """
    if _open:
        gc.collect()
    everyone = exchange(sorted(_dropped))
    for number in sorted(set.intersection(*map(set, everyone))):
        shared, groups = _dropped.pop(number)
        if shared is not None:
            shared.close()
        for group in groups:
            dist.destroy_process_group(group)


def close_all() -> None:
    """Release every communicator of this process, at its end at the latest.

    Threads of a process group that is still alive while the interpreter is torn down can abort the process.
    """
    watch.stop()
    for comm in list(_open):
        comm.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _exchange(
    value: object, world_size: int, group: Any, key: Key, what: str, *, over_gloo: bool
) -> list[Any]:
    """Every rank's picklable ``value``, in rank order."""
    if world_size == 1:
        return [value]
    if not over_gloo:
        values: list[Any] = [None] * world_size
        with watch.waiting(key, what):
            dist.all_gather_object(values, value, group=group)
        return values
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    mine = torch.tensor([own.numel()], dtype=torch.int64)
    _await(dist.all_gather(sizes, mine, group=group, async_op=True), key, what)
    largest = max(int(size) for size in sizes)
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: own.numel()] = own
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    _await(dist.all_gather(parts, padded, group=group, async_op=True), key, what)
    return [
        pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
    ]


class HostChannel:
    """Small collectives between the hosts, over gloo whatever the device is."""

    def __init__(self, group: Any, world_size: int, number: int) -> None:
        self._group, self._world_size, self._number = group, world_size, number

    def exchange(self, value: object) -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        key = watch.next_key(self._number, "host")
        return _exchange(
            value, self._world_size, self._group, key, "agrees in the background", over_gloo=True
        )

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any rank has it."""
        if self._world_size == 1:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [bool(value) for value in tensor.tolist()]


class Comm:
    """The collectives of one engine over the default process group (and a second one for reductions).

    Reductions have a group of their own, so that they neither wait for gathers nor need to be issued in one
    common order with them. Between CPU ranks of one machine, bulk data goes through shared memory.

    ``shared``: tensors that are sent (sources of a gather, buckets of a reduction) must come from ``empty``.
    """

    def __init__(self, device: torch.device, *, share: bool = True) -> None:
        """``share`` allows shared memory."""
        self.device = device
        self.number = next(_numbers)
        self._labels = ["a tensor"]
        self._recent: tuple[deque[int], ...] = tuple(deque(maxlen=_REMEMBERED) for _ in _CHANNELS)
        self._hashes = [0 for _ in _CHANNELS]
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._gather_group = dist.group.WORLD
        self._reduce_group: Any = dist.group.WORLD
        if self.world_size > 1:
            self._reduce_group = dist.new_group(list(range(self.world_size)))
        self._native_reduce_scatter = device.type != "cpu"
        self._channels: list[Any] = []
        if self.world_size > 1:
            watch.start(self.rank, self.world_size, self.exchange)
            _close_dropped(self.exchange)
        self._shared: SharedMemory | None = None
        if self.world_size > 1 and device.type == "cpu":
            allowed = share and read_environment().shared_memory
            self._shared = connect(
                self.rank,
                self.world_size,
                self.exchange,
                _TIMEOUT_S,
                allowed,
                describe=partial(_say, self._labels),
                check=watch.check,
            )
        _open.add(self)
        held = [self._reduce_group] if self.world_size > 1 else []
        self._forsaken = finalize(self, _drop, self.number, self._shared, held)
        self._forsaken.atexit = False

    def label(self, name: str) -> int:
        """A number for the tensors of one unit, the same on all ranks that make the same units."""
        self._labels.append(name)
        return len(self._labels) - 1

    def _begin(self, channel: int, label: int) -> tuple[Key, str]:
        """Note the start of a collective about a labelled tensor."""
        self._recent[channel].append(label)
        self._hashes[channel] = (self._hashes[channel] * 31 + label + 1) % _PRIME
        return (
            watch.next_key(self.number, _CHANNELS[channel]),
            f"{_VERBS[channel]} {self._labels[label]}",
        )

    def _control(self, what: str) -> tuple[Key, str]:
        return watch.next_key(self.number, "control"), what

    def order_marks(self) -> list[float]:
        """Numbers of the order of gathers and reductions so far, to be summed over the ranks and given to
        :meth:`order_differs`.
        """
        marks: list[float] = []
        for value in self._hashes:
            for part in (value & _MASK, value >> _HASH_BITS & _MASK):
                marks += [float(part), float(part * part)]
        return marks

    def order_differs(self, sums: Tensor) -> Tensor:
        """Whether ranks have used the model in different orders, 0-dim bool, from the sums of the marks.

        Numbers are alike on all of n ranks if n times the sum of their squares is the square of their sum;
        they are small enough for float64 to be exact.
        """
        pairs = sums.view(-1, 2)
        return (pairs[:, 1] * self.world_size != pairs[:, 0].square()).any()

    def forget_order(self) -> None:
        """The orders are known to be the same so far."""
        for recent in self._recent:
            recent.clear()

    def raise_order(self) -> None:
        """Raises RankMismatchError that names where the orders part. Collective."""
        everyone = self.exchange([list(recent) for recent in self._recent])
        for channel, _ in enumerate(_CHANNELS):
            for rank, lists in enumerate(everyone):
                mine, other = everyone[0][channel], lists[channel]
                for a, b in itertools.zip_longest(mine, other):
                    if a != b:
                        said = [
                            "does not" if label is None else f"{_VERBS[channel]} {self._labels[label]}"
                            for label in (b, a)
                        ]
                        raise RankMismatchError(
                            f"rank {rank} {said[0]}, while rank 0 {said[1]}: all ranks must use the same "
                            "parts of the model in the same order (mixtures of experts: "
                            "zero_optimization.leaf_module)"
                        )
        raise RankMismatchError("the ranks have used the model in different orders")

    def _count(self, name: str, numel: int) -> None:
        if self.world_size > 1:
            self.moved[name] += numel
            self.calls[name] += 1

    @property
    def moved_numel(self) -> int:
        """Elements moved since the last reset of ``moved``, parameters and gradients alike."""
        return sum(self.moved[k] for k in ("all_gather", "reduce_scatter", "all_reduce"))

    @property
    def shared(self) -> bool:
        """Whether memory from ``empty`` is seen by all ranks; it then lives as long as this object."""
        return self._shared is not None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor to send from."""
        if self._shared is not None:
            return self._shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def all_gather(self, full: Tensor, source: Tensor, label: int = 0) -> Pending:
        """Start to fill ``full`` (w * s elements) from every rank's ``source`` (s).

        ``source`` is this rank's slice of ``full`` itself, or a tensor of another floating dtype, which is
        cast. It must not change before :meth:`settle`.
        """
        s = source.numel()
        own = full[self.rank * s : (self.rank + 1) * s]
        if own.data_ptr() != source.data_ptr():
            own.copy_(source, non_blocking=True)
        if self.world_size == 1:
            return DONE
        self._count("all_gather", full.numel())
        noted = self._begin(_GATHER, label)
        if self._shared is not None:
            return _Noted(self._shared.all_gather(_GATHER, full, source, label), *noted)
        return _Work(_all_gather_flat(full, own, group=self._gather_group, async_op=True), *noted, full)

    def settle(self) -> bool:
        """Finish what cannot go on without this rank's help; True if all gathers have arrived by then.

        To be called by all ranks. Over gloo and NCCL, collectives proceed by themselves.
        """
        if self._shared is not None:
            with watch.waiting(*self._control("finishes what it has sent")):
                self._shared.settle()
        return self.world_size == 1 or self._shared is not None

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int = 0) -> Pending:
        """Start to fill ``shard`` (s, any dtype) with this rank's slice of the sum over ranks of ``bucket``
        (w * s).

        ``bucket`` must stay untouched until the result has been waited for. gloo's own reduce-scatter is an
        all-reduce of a clone, twice the bytes; an all-to-all with a local sum in the shard's (wider) dtype is
        faster and more exact.
        """
        w = self.world_size
        if w == 1:
            shard.copy_(bucket)
            return DONE
        self._count("reduce_scatter", bucket.numel())
        noted = self._begin(_REDUCE, label)
        if self._shared is not None:
            return _Noted(self._shared.reduce_scatter(_REDUCE, shard, bucket, label), *noted)
        if self._native_reduce_scatter:
            direct = shard.dtype == bucket.dtype
            pieces = shard if direct else torch.empty_like(shard, dtype=bucket.dtype)
            sent = _reduce_scatter_flat(pieces, bucket, group=self._reduce_group, async_op=True)
            work = _Work(sent, *noted, bucket)
            return work if direct else _Sum(work, shard, pieces.view(1, -1), bucket)
        pieces = torch.empty_like(bucket)
        sent = dist.all_to_all_single(pieces, bucket, group=self._reduce_group, async_op=True)
        return _Sum(_Work(sent, *noted, bucket), shard, pieces.view(w, -1), bucket, self.rank)

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The narrowest dtype that holds a reduced shard of a ``dtype`` bucket without a further rounding."""
        if self.world_size == 1 or self._native_reduce_scatter:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def all_reduce(self, tensor: Tensor, label: int = 0) -> Pending:
        """Start to sum ``tensor`` (its size a multiple of the world size) over the ranks in place."""
        if self.world_size == 1:
            return DONE
        self._count("all_reduce", 2 * tensor.numel())
        noted = self._begin(_REDUCE, label)
        if self._shared is not None:
            return _Noted(self._shared.all_reduce(_REDUCE, tensor, label), *noted)
        return _Work(dist.all_reduce(tensor, group=self._reduce_group, async_op=True), *noted, tensor)

    def all_reduce_scalars(self, tensor: Tensor, what: str = "sums up a step's numbers") -> Tensor:
        """Sum a handful of numbers over the ranks and return them; not counted as volume."""
        if self.world_size > 1:
            self.calls["scalars"] += 1
            work = dist.all_reduce(tensor, group=self._reduce_group, async_op=True)
            _Work(work, *self._control(what), tensor).wait()
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``source``'s."""
        if self.world_size > 1 and tensor.numel():
            self._count("broadcast", tensor.numel())
            work = dist.broadcast(tensor, source, group=self._gather_group, async_op=True)
            _Work(work, *self._control("shares values of rank 0"), tensor).wait()

    def exchange(self, value: object, what: str = "agrees with the other ranks") -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        over_gloo = self.device.type == "cpu"
        return _exchange(
            value, self.world_size, self._gather_group, *self._control(what), over_gloo=over_gloo
        )

    def host_channel(self) -> HostChannel:
        """A way of its own between the hosts, which another thread may use beside everything else here.
        Collective.
        """
        group = None
        if self.world_size > 1:
            group = dist.new_group(list(range(self.world_size)), backend="gloo", timeout=_CHANNEL_TIMEOUT)
            self._channels.append(group)
        return HostChannel(group, self.world_size, self.number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            work = dist.barrier(group=self._gather_group, async_op=True)
            _await(work, *self._control("waits at a barrier"))

    def close(self) -> None:
        """Release the process groups; the object is of no use afterwards."""
        self._forsaken.detach()
        if self._shared is not None:
            self._shared.close()
        if self._reduce_group not in (None, self._gather_group) and dist.is_initialized():
            dist.destroy_process_group(self._reduce_group)
        for group in self._channels:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._channels.clear()
        self._reduce_group = self._gather_group = None
