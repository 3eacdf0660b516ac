"""Collectives: the only seam between the runtime and torch.distributed.

Every call counts the elements it moves, so that a test can hold the runtime to its promised volume. An
all-gather or reduce-scatter of a buffer of n elements counts n, an all-reduce 2n (it is one of each).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .environment import read_environment
from .shared_memory import SharedMemory, connect


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


class _Work:
    """Waits for a torch Work and keeps its tensors alive until then."""

    __slots__ = ("_keep", "_work")

    def __init__(self, work: Any, *keep: Tensor) -> None:
        self._work, self._keep = work, keep

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work, self._keep = None, ()


class _Sum:
    """A reduce-scatter under way: received pieces are summed into the shard when it is waited for."""

    __slots__ = ("_bucket", "_first", "_pieces", "_shard", "_work")

    def __init__(self, work: Any, shard: Tensor, pieces: Tensor, bucket: Tensor, first: int = 0) -> None:
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
_TIMEOUT_S = 1800.0
_CHANNEL_TIMEOUT = timedelta(hours=12)
"""One rank may write to a slow disk for long while the others wait for it."""

_open: WeakSet[Comm] = WeakSet()


def close_all() -> None:
    """Release every communicator of this process, at its end at the latest.

    Threads of a process group that is still alive while the interpreter is torn down can abort the process.
    """
    for comm in list(_open):
        comm.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _exchange(value: object, world_size: int, group: Any) -> list[Any]:
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value, group=group)
    return values


class HostChannel:
    """Small collectives between the hosts, over gloo whatever the device is."""

    def __init__(self, group: Any, world_size: int) -> None:
        self._group, self._world_size = group, world_size

    def exchange(self, value: object) -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        return _exchange(value, self._world_size, self._group)

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
        self._shared: SharedMemory | None = None
        if self.world_size > 1 and device.type == "cpu":
            allowed = share and read_environment().shared_memory
            self._shared = connect(self.rank, self.world_size, self.exchange, _TIMEOUT_S, allowed)
        _open.add(self)

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

    def all_gather(self, full: Tensor, source: Tensor) -> Pending:
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
        if self._shared is not None:
            return self._shared.all_gather(_GATHER, full, source)
        return _Work(_all_gather_flat(full, own, group=self._gather_group, async_op=True), full)

    def settle(self) -> bool:
        """Finish what cannot go on without this rank's help; True if all gathers have arrived by then.

        To be called by all ranks. Over gloo and NCCL, collectives proceed by themselves.
        """
        if self._shared is not None:
            self._shared.settle()
        return self.world_size == 1 or self._shared is not None

    def reduce_scatter(self, shard: Tensor, bucket: Tensor) -> Pending:
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
        if self._shared is not None:
            return self._shared.reduce_scatter(_REDUCE, shard, bucket)
        if self._native_reduce_scatter:
            direct = shard.dtype == bucket.dtype
            pieces = shard if direct else torch.empty_like(shard, dtype=bucket.dtype)
            work = _reduce_scatter_flat(pieces, bucket, group=self._reduce_group, async_op=True)
            return _Work(work, bucket) if direct else _Sum(work, shard, pieces.view(1, -1), bucket)
        pieces = torch.empty_like(bucket)
        work = dist.all_to_all_single(pieces, bucket, group=self._reduce_group, async_op=True)
        return _Sum(work, shard, pieces.view(w, -1), bucket, self.rank)

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The narrowest dtype that holds a reduced shard of a ``dtype`` bucket without a further rounding."""
        if self.world_size == 1 or self._native_reduce_scatter:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start to sum ``tensor`` (its size a multiple of the world size) over the ranks in place."""
        if self.world_size == 1:
            return DONE
        self._count("all_reduce", 2 * tensor.numel())
        if self._shared is not None:
            return self._shared.all_reduce(_REDUCE, tensor)
        return _Work(dist.all_reduce(tensor, group=self._reduce_group, async_op=True), tensor)

    def all_reduce_scalars(self, tensor: Tensor) -> Tensor:
        """Sum a handful of numbers over the ranks and return them; not counted as volume."""
        if self.world_size > 1:
            self.calls["scalars"] += 1
            dist.all_reduce(tensor, group=self._reduce_group)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with rank ``source``'s."""
        if self.world_size > 1 and tensor.numel():
            self._count("broadcast", tensor.numel())
            dist.broadcast(tensor, source, group=self._gather_group)

    def exchange(self, value: object) -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        return _exchange(value, self.world_size, self._gather_group)

    def host_channel(self) -> HostChannel:
        """A way of its own between the hosts, which another thread may use beside everything else here.
        Collective.
        """
        group = None
        if self.world_size > 1:
            group = dist.new_group(list(range(self.world_size)), backend="gloo", timeout=_CHANNEL_TIMEOUT)
            self._channels.append(group)
        return HostChannel(group, self.world_size)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self._gather_group)

    def close(self) -> None:
        """Release the process groups; the object is of no use afterwards."""
        if self._shared is not None:
            self._shared.close()
        if self._reduce_group not in (None, self._gather_group) and dist.is_initialized():
            dist.destroy_process_group(self._reduce_group)
        for group in self._channels:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._channels.clear()
        self._reduce_group = self._gather_group = None
