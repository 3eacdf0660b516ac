"""Runs collectives: the only seam between the runtime and torch.distributed.

Every call counts the elements it moves, so that a test can hold the runtime to its promised volume. An
all-gather or reduce-scatter of a buffer of n elements counts n, an all-reduce 2n (it is one of each).
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from ..environment import read_environment
from ..errors import RankMismatchError
from .order import Order
from .peer_memory import Connect, Identity, PeerMemory
from .pending import (
    DONE,
    Exchange,
    HostChannel,
    Noted,
    Pending,
    Work,
    await_work,
    exchange_objects,
    sum_pieces,
)
from .process_group import new_group, open_comms
from .waits import Key, waits

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_GATHER, _REDUCE = 0, 1
"""Number the channels: collectives of one kind are issued in one order on all ranks."""
_CHANNELS = ("gather", "reduce")
_VERBS = {_GATHER: "gathers", _REDUCE: "reduces the gradients of"}
_TIMEOUT_S = 1800.0
_CHANNEL_TIMEOUT = timedelta(hours=12)
"""Limits a host collective: one rank may write to a slow disk for long while the others wait."""

_dropped: dict[int, tuple[PeerMemory | None, list[Any]]] = {}
"""Keeps, by their numbers, what communicators that were never closed have left."""
_numbers = itertools.count()


def _say(labels: Sequence[str], channel: int, identity: Identity) -> str:
    label, size = identity
    known = label < len(labels)
    name = labels[label] if known else "a part of the model that this rank does not have"
    return f"{_VERBS[channel & 127]} {name} ({size >> 4} elements of {size & 15} bytes)"


def _drop(number: int, shared: PeerMemory | None, groups: list[Any]) -> None:
    _dropped[number] = shared, groups


def _close_dropped(exchange: Exchange) -> None:
    """Release what dropped engines have left, once all ranks have dropped them: the cycle collector finds
    them at another time on each rank. Collective.
    """
    if open_comms:
        gc.collect()
    everyone = exchange(sorted(_dropped))
    for number in sorted(set.intersection(*map(set, everyone))):
        shared, groups = _dropped.pop(number)
        if shared is not None:
            shared.close()
        for group in groups:
            dist.destroy_process_group(group)


class Comm:
    """Runs the collectives of one engine over the default process group (and a second one for reductions).

    Reductions have a separate group, so that they neither wait for gathers nor need to be issued in one
    common order with them. Between CPU ranks of one machine, bulk data goes through shared memory.

    ``shared``: tensors that are sent (sources of a gather, buckets of a reduction) must come from ``empty``.
    """

    def __init__(self, device: torch.device, *, connect: Connect | None = None, share: bool = True) -> None:
        """Join the ranks; ``connect`` joins CPU ranks by shared memory, if all of them ``share``."""
        self.device = device
        self.number = next(_numbers)
        self._labels = ["a tensor"]
        self.world_size = dist.get_world_size()
        self.order = Order(self.world_size, len(_CHANNELS))
        self.rank = dist.get_rank()
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._gather_group = dist.group.WORLD
        self._reduce_group: Any = dist.group.WORLD
        self._own_groups: list[Any] = []
        self._native_reduce_scatter = device.type != "cpu"
        if self.world_size > 1:
            self._reduce_group = new_group(self.world_size)
            self._own_groups.append(self._reduce_group)
            waits.start_watch(self.rank, self.world_size)
            _close_dropped(self.exchange)
        self._shared: PeerMemory | None = None
        if self.world_size > 1 and device.type == "cpu" and connect is not None:
            allowed = share and read_environment().shared_memory
            self._shared = connect(
                self.rank,
                self.world_size,
                self.exchange,
                _TIMEOUT_S,
                allowed,
                describe=partial(_say, self._labels),
                check=waits.check,
            )
        open_comms.add(self)
        self._forsaken = finalize(self, _drop, self.number, self._shared, self._own_groups)
        self._forsaken.atexit = False

    def label(self, name: str) -> int:
        """Return a number for the tensors of one unit, equal on all ranks that make equal units."""
        self._labels.append(name)
        return len(self._labels) - 1

    def _begin(self, channel: int, label: int) -> tuple[Key, str]:
        """Note the start of a collective about a labelled tensor."""
        self.order.add(channel, label)
        return (
            waits.next_key(self.number, _CHANNELS[channel]),
            f"{_VERBS[channel]} {self._labels[label]}",
        )

    def _control(self, what: str) -> tuple[Key, str]:
        return waits.next_key(self.number, "control"), what

    def raise_order(self) -> None:
        """Raise RankMismatchError that names where the ranks' orders part. Collective."""
        channel, rank, other, mine = self.order.first_difference(self.exchange(self.order.recent()))
        said = [
            "does nothing more" if label is None else f"{_VERBS[channel]} {self._labels[label]}"
            for label in (other, mine)
        ]
        raise RankMismatchError(
            f"rank {rank} {said[0]}, while rank 0 {said[1]}: all ranks must use the same parts of the model "
            "in the same order (mixtures of experts: zero_optimization.leaf_module)"
        )

    def _count(self, name: str, numel: int) -> None:
        if self.world_size > 1:
            self.moved[name] += numel
            self.calls[name] += 1

    @property
    def shared(self) -> bool:
        """Tell whether all ranks see memory from ``empty``; it then lives as long as this object."""
        return self._shared is not None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor to send from."""
        if self._shared is not None:
            return self._shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def release(self, storage: torch.UntypedStorage) -> bool:
        """Release the memory of a storage from ``empty`` until it is written again. Returns False for any
        other storage, which can be resized.
        """
        return self._shared is not None and self._shared.release(storage)

    def all_gather(self, full: Tensor, source: Tensor, label: int = 0) -> Pending:
        """Start to fill ``full`` (w * s elements) from every rank's ``source`` (s).

        ``source`` is this rank's slice of ``full`` itself, or a tensor of another floating dtype, which is
        cast. It must not change before :meth:`drain`.
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
            return Noted(self._shared.all_gather(_GATHER, full, source, label), *noted)
        return Work(all_gather_flat(full, own, group=self._gather_group, async_op=True), *noted, full)

    def drain(self) -> bool:
        """Finish what cannot go on without this rank's help; return True if all gathers have arrived by then.

        All ranks must call it. Over gloo and NCCL, collectives proceed by themselves.
        """
        if self._shared is not None:
            with waits.waiting(*self._control("finishes what it has sent")):
                self._shared.drain()
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
            return Noted(self._shared.reduce_scatter(_REDUCE, shard, bucket, label), *noted)
        if self._native_reduce_scatter:
            direct = shard.dtype == bucket.dtype
            pieces = shard if direct else torch.empty_like(shard, dtype=bucket.dtype)
            sent = reduce_scatter_flat(pieces, bucket, group=self._reduce_group, async_op=True)
            work = Work(sent, *noted, bucket)
            return work if direct else work.then(lambda: sum_pieces(shard, pieces.view(1, -1)))
        pieces = torch.empty_like(bucket)
        sent = dist.all_to_all_single(pieces, bucket, group=self._reduce_group, async_op=True)
        work = Work(sent, *noted, bucket)
        return work.then(lambda: sum_pieces(shard, pieces.view(w, -1), self.rank))

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the narrowest dtype that holds a reduced shard of a ``dtype`` bucket unrounded."""
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
            return Noted(self._shared.all_reduce(_REDUCE, tensor, label), *noted)
        return Work(dist.all_reduce(tensor, group=self._reduce_group, async_op=True), *noted, tensor)

    def all_reduce_scalars(self, tensor: Tensor, what: str = "sums up a step's numbers") -> Tensor:
        """Sum a few numbers over the ranks and return them; not counted as volume."""
        if self.world_size > 1:
            self.calls["scalars"] += 1
            work = dist.all_reduce(tensor, group=self._reduce_group, async_op=True)
            Work(work, *self._control(what), tensor).wait()
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``source``'s."""
        if self.world_size > 1 and tensor.numel():
            self._count("broadcast", tensor.numel())
            work = dist.broadcast(tensor, source, group=self._gather_group, async_op=True)
            Work(work, *self._control("shares values of rank 0"), tensor).wait()

    def exchange(self, value: object, what: str = "agrees with the other ranks") -> list[Any]:
        """Return every rank's picklable ``value``, in rank order."""
        over_gloo = self.device.type == "cpu"
        return exchange_objects(
            value, self.world_size, self._gather_group, *self._control(what), over_gloo=over_gloo
        )

    def host_channel(self) -> HostChannel:
        """Return a separate gloo group for host messages, safe to use from another thread. Collective."""
        group = None
        if self.world_size > 1:
            group = new_group(self.world_size, backend="gloo", timeout=_CHANNEL_TIMEOUT)
            self._own_groups.append(group)
        return HostChannel(group, self.world_size, self.number)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            work = dist.barrier(group=self._gather_group, async_op=True)
            await_work(work, *self._control("waits at a barrier"))

    def close(self) -> None:
        """Release the process groups; the object cannot be used afterwards."""
        self._forsaken.detach()
        if self._shared is not None:
            self._shared.close()
        for group in self._own_groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        self._own_groups.clear()
        self._reduce_group = self._gather_group = None
