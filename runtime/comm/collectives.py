"""Runs collectives: the only seam between the runtime and torch.distributed.

Every call counts the elements it moves, so that a test can hold the runtime to its promised volume. An
all-gather or reduce-scatter of a buffer of n elements counts n, an all-reduce 2n (it is one of each).
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from ..environment import read_environment
from ..errors import RankMismatchError
from ..mesh import MeshShape
from .link import GATHER, REDUCE, Note, RankLink
from .pending import Exchange, Key, Pending, Work, await_work, exchange_objects, waits
from .process_group import new_group, open_comms, world_timeout
from .shard_spec import spec_of
from .shared_memory import Identity, SharedMemory

if TYPE_CHECKING:
    from ..parallel.checks import SameBatch

# -- order ------------------------------------------------------------------------------------------
#
# Records the order in which a rank has gathered and reduced units, and compares it with the other ranks'.


_REMEMBERED = 4096
"""Limits the collectives whose order is kept, to name the first that differs between the ranks."""
_HASH_BITS = 12
_MASK = (1 << _HASH_BITS) - 1
_PRIME = 16_777_213  # below 2 ** (2 * _HASH_BITS)


class Order:
    """Keeps a rolling hash of the labels of each channel's collectives, and the labels themselves since the
    orders were last known to agree.
    """

    def __init__(self, world_size: int, channels: int) -> None:
        self._world_size = world_size
        self._recent: list[deque[int]] = [deque(maxlen=_REMEMBERED) for _ in range(channels)]
        self._hashes = [0] * channels

    def add(self, channel: int, label: int) -> None:
        """Note that a collective begins."""
        self._recent[channel].append(label)
        # Plus 1, because label 0 has to change a hash of 0, too.
        self._hashes[channel] = (self._hashes[channel] * 31 + label + 1) % _PRIME

    def marks(self) -> list[float]:
        """Return numbers to be summed over the ranks and given to :meth:`differs`: each part of each hash,
        and its square.
        """
        found: list[float] = []
        for value in self._hashes:
            # In two halves: sums of their squares over the ranks stay below 2 ** 53, where float64 is exact.
            for part in (value & _MASK, value >> _HASH_BITS & _MASK):
                found += [float(part), float(part * part)]
        return found

    def differs(self, sums: Tensor) -> Tensor:
        """Tell whether the ranks' orders differ, 0-dim bool, from the sums of the marks (float64).

        Numbers are equal on all of n ranks if n times the sum of their squares is the square of their sum;
        they are small enough for float64 to be exact.
        """
        pairs = sums.view(-1, 2)
        return (pairs[:, 1] * self._world_size != pairs[:, 0].square()).any()

    def forget(self) -> None:
        """Forget the labels so far, whose order has been equal on all ranks."""
        for labels in self._recent:
            labels.clear()

    def recent(self) -> list[list[int]]:
        """Return the labels since then, by channel."""
        return [list(labels) for labels in self._recent]

    def first_difference(
        self, everyone: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[int, int, int | None, int | None]:
        """Find where the :meth:`recent` of all ranks part: return channel, rank, and that rank's and rank 0's
        label; None for a label where a rank has no further one.
        """
        for channel in range(len(self._hashes)):
            for rank, lists in enumerate(everyone):
                for mine, other in itertools.zip_longest(everyone[0][channel], lists[channel]):
                    if mine != other:
                        return channel, rank, other, mine
        return 0, 0, None, None


# -- collectives ------------------------------------------------------------------------------------


_CHANNELS = ("gather", "reduce")
_VERBS = {GATHER: "gathers", REDUCE: "reduces the gradients of"}
_TIMEOUT_S = 1800.0
_DEBUGGED_TIMEOUT_S = 20 * 86400.0


MakeLink = Callable[["Comm", "Callable[..., SharedMemory | None] | None"], RankLink]
"""Makes the link of a communicator; gets what joins ranks by shared memory: ``shared_memory.connect`` that
needs only the rank, the number of ranks and an exchange between them. Collective.
"""
_dropped: dict[int, tuple[SharedMemory | None, list[Any]]] = {}
"""Keeps, by their numbers, what communicators that were never closed have left."""
_numbers = itertools.count()


def _subject_of(unit: str) -> str:
    """Say what a unit's collectives are about. A module's name may be "0", in a Sequential."""
    name, space, rest = unit.partition(" ")
    module = "the root module" if name == "root" else f"module '{name}'"
    return f"{module}{space}{rest}"


def _say(subjects: Sequence[str], channel: int, identity: Identity) -> str:
    label, size = identity
    name = subjects[label] if label < len(subjects) else "a module that this rank does not have"
    return f"{_VERBS[channel & 127]} {name} ({size >> 4} elements of {size & 15} bytes)"


def _drop(number: int, shared: SharedMemory | None, groups: list[Any]) -> None:
    _dropped[number] = shared, groups


def _close_dropped(exchange: Exchange) -> None:
    """Release what dropped engines have left, once all ranks have dropped them: the cycle collector finds
    them at another time on each rank. Collective.
    """
    if open_comms:
        gc.collect()
    # Sorted: the groups have to end in the same order on all ranks.
    for number in sorted(set.intersection(*map(set, exchange(sorted(_dropped))))):
        shared, groups = _dropped.pop(number)
        if shared is not None:
            shared.close()
        for group in groups:
            dist.destroy_process_group(group)


class Comm:
    """Runs the collectives of one engine.

    Units are sharded over :attr:`link`, a group of ranks. Where it is smaller than the world, equal shards of
    all such groups stay equal.

    ``shared``: tensors that are sent (sources of a gather, buckets of a reduction) must come from ``empty``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        connect: Callable[..., SharedMemory | None] | None = None,
        share: bool = True,
        mesh: MakeLink | None = None,
    ) -> None:
        """Join the ranks; ``connect`` joins CPU ranks by shared memory, if all of them ``share``; ``mesh``
        makes the link that units are sharded over, by default one of all ranks.
        """
        self.device = device
        self.number = next(_numbers)
        self._labels = ["a tensor"]
        """Names the unit of each label; 0 is a tensor of no unit."""
        self._subjects = ["a tensor"]
        """Says in a message what the collectives of each label are about: made once, not at each call."""
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.mesh = MeshShape(self.world_size)
        self.order = Order(self.world_size, len(_CHANNELS))
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.own_groups: list[Any] = []
        """Lists the process groups that end with this object."""
        self.axes: dict[str, Any] = {}
        """Holds the ``Axis`` of each axis with several ranks by name; they end with this object."""
        self.current_pass_id: Callable[[], int] = lambda: 0
        """Returns the number of the running pass, counted over all engines; 0 outside a pass. Set by
        ``ShardedModel`` in zero/hooks.py.
        """
        self.batches: list[SameBatch] = []
        """Lists what the ranks of an axis have to have been given alike before a step."""
        self.activations: Any = None
        """Settings of activation checkpointing, set by ``runtime/activation/checkpointing.py``."""
        self._world = RankLink(device, self.world_size, self.rank, dist.group.WORLD, dist.group.WORLD)
        self.data = self._world
        """Joins the ranks whose gradients are averaged: all of them, unless some share each layer."""
        self.experts: RankLink | None = None
        """Joins the ranks that have the same experts, where not all have."""
        self._links: dict[int, RankLink] = {}
        self.link = self._world
        join = None
        if self.world_size > 1:
            # See Note [Two channels] in link.py.
            self._world.reduce_group = self.new_group(range(self.world_size))
            waits.start_watch(self.rank, self.world_size)
            _close_dropped(self.exchange)
        if self.world_size > 1 and device.type == "cpu" and connect is not None:
            environment = read_environment()
            say = partial(_say, self._subjects)
            allowed = share and environment.shared_memory
            # A debugger holds a rank at a breakpoint while the others wait.
            timeout = world_timeout()
            limit_s = _TIMEOUT_S if timeout is None else timeout.total_seconds()
            if not environment.timeouts:
                limit_s = _DEBUGGED_TIMEOUT_S
            join = partial(connect, timeout_s=limit_s, allowed=allowed, describe=say, check=waits.check)
        if mesh is not None:
            self.link = mesh(self, join)
        elif join is not None:
            self.link.shared = join(self.rank, self.world_size, self.exchange)
        open_comms.add(self)
        self._forsaken = finalize(self, _drop, self.number, self.link.shared, self.own_groups)
        self._forsaken.atexit = False

    def new_group(self, ranks: Iterable[int], **options: Any) -> Any:
        """Make a process group that ends with this object. Collective; ranks outside of it get no group."""
        group = new_group(list(ranks), **options)
        if isinstance(group, dist.ProcessGroup):
            self.own_groups.append(group)
        return group

    def label(self, name: str, link: RankLink) -> int:
        """Return a number for the tensors of one unit, which is sharded over a link; equal on all ranks that
        make equal units.
        """
        self._links[len(self._labels)] = link
        self._labels.append(name)
        self._subjects.append(_subject_of(name))
        return len(self._labels) - 1

    def find_shard_link(self, parameter: Tensor) -> tuple[RankLink, RankLink, int]:
        """Return the link that shards this parameter, the link that averages its gradients, and its number of
        replicas in the tensor-parallel group.
        """
        spec = spec_of(parameter)
        others = self.experts if getattr(spec, "of_experts", False) else None
        return others or self.link, others or self.data, int(getattr(spec, "copies", self.mesh.tensor))

    def _begin(self, channel: int, label: int, kind: str, numel: int) -> Note:
        """Note the start of a collective about a labelled tensor, and count its volume."""
        what = f"{_VERBS[channel]} {self._subjects[label]}"
        if self.world_size == 1:
            return (self.number, _CHANNELS[channel], 0), what
        self._count(kind, numel)
        self.order.add(channel, label)
        return waits.next_key(self.number, _CHANNELS[channel]), what

    def _control(self, what: str) -> tuple[Key, str]:
        return waits.next_key(self.number, "control"), what

    def batch_marks(self) -> list[Tensor]:
        """Return numbers to be summed over the ranks behind the order's, for :meth:`differs`."""
        return [each.marks() for each in self.batches]

    def differs(self, sums: Tensor) -> Tensor:
        """Tell whether the ranks' orders, or the batches of ranks that share one, differ: 0-dim bool."""
        count = len(self.order.marks())
        found = self.order.differs(sums[:count])
        return found | (sums[count:] != 0).any() if self.batches else found

    def raise_order(self) -> None:
        """Raise RankMismatchError that names the ranks whose batches differ, or where the orders part.
        Collective.
        """
        # Batches before orders: ranks with different batches may also take different branches, and the batch
        # is the cause.
        seen = self.exchange([(each.ranks, each.seen(), each.complaint) for each in self.batches])
        for everyone in zip(*seen, strict=True):
            for ranks, _, complaint in everyone:
                if len({everyone[rank][1] for rank in ranks}) > 1:
                    for batch in self.batches:
                        batch.forget()
                    raise RankMismatchError(complaint)
        channel, rank, other, mine = self.order.first_difference(self.exchange(self.order.recent()))
        said = [
            "makes no further call" if label is None else f"{_VERBS[channel]} {self._subjects[label]}"
            for label in (other, mine)
        ]
        raise RankMismatchError(
            f"rank {rank} {said[0]}, while rank 0 {said[1]}: all ranks must use the same modules in the "
            "same order (for a mixture of experts, set zero_optimization.leaf_module)"
        )

    def _count(self, name: str, numel: int) -> None:
        self.moved[name] += numel
        self.calls[name] += 1

    @property
    def shared(self) -> bool:
        """Tell whether ranks of a node see memory from ``empty``; it then lives as long as this object."""
        return self.link.shared is not None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor to send from."""
        if self.link.shared is not None:
            return self.link.shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def release(self, storage: torch.UntypedStorage) -> bool:
        """Release the memory of a storage from ``empty`` until it is written again. Returns False for any
        other storage, which can be resized.
        """
        return self.link.shared is not None and self.link.shared.release(storage)

    def all_gather(self, full: Tensor, source: Tensor, label: int = 0, rounded: bool = False) -> Pending:
        """Start to fill ``full`` from the ``source`` of every rank of the link. Collective.

        Args:
            full: Flat, size * s elements on the device, where size is the number of shards of the link.
            source: This rank's s elements: its slice of ``full`` itself, or a tensor of any floating dtype,
                which is cast. It must not change before :meth:`drain`.
            label: What :meth:`label` has returned for the unit. 0 is a tensor of no unit.
            rounded: Send fewer bits if the link allows it (``RankLink.rounds``).

        Returns:
            What waits for ``full``.
        """
        note = self._begin(GATHER, label, "all_gather", full.numel())
        return self._links.get(label, self.link).all_gather(full, source, label, note, rounded)

    def observe(self, kind: str, nbytes: int, start: Callable[[], Pending]) -> Pending:
        """Start a collective of another module by ``start()``. A subclass may log it."""
        return start()

    def drain(self) -> bool:
        """Finish what cannot go on without this rank's help; return True if all gathers have arrived by then.

        All ranks must call it. Over gloo and NCCL, collectives in one hop proceed by themselves.
        """
        if self.shared or self.link is not self._world:
            with waits.waiting(*self._control("finishes its sends")):
                self.link.drain()
        return self.world_size == 1 or self.shared

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int = 0) -> Pending:
        """Start to fill ``shard`` with this rank's slice of the sum of ``bucket`` over all ranks. Collective.

        Args:
            shard: Flat, s elements on the device, any floating dtype. It may be this rank's slice of
                ``bucket``.
            bucket: Flat, size * s elements. It must not change before the result has been waited for.
            label: What :meth:`label` has returned for the unit. 0 is a tensor of no unit.

        Returns:
            What waits for ``shard``.
        """
        note = self._begin(REDUCE, label, "reduce_scatter", bucket.numel())
        return self._links.get(label, self.link).reduce_scatter(shard, bucket, label, note)

    def all_reduce(self, tensor: Tensor, label: int = 0) -> Pending:
        """Start to sum ``tensor`` over all ranks, in place. Collective.

        Args:
            tensor: Flat, on the device. Its number of elements is a multiple of the world size.
            label: What :meth:`label` has returned for the unit. 0 is a tensor of no unit.
        """
        note = self._begin(REDUCE, label, "all_reduce", 2 * tensor.numel())
        return self._links.get(label, self.link).all_reduce(tensor, label, note)

    def all_reduce_scalars(self, tensor: Tensor, what: str = "all-reduces a step's statistics") -> Tensor:
        """Sum a few numbers over the ranks in place, and return them; not counted as volume. Collective.

        Args:
            tensor: On the device, any shape and dtype.
            what: What this rank does, for the message of a deadlock.
        """
        if self.world_size > 1:
            self.calls["scalars"] += 1
            work = dist.all_reduce(tensor, group=self._world.reduce_group, async_op=True)
            Work(work, *self._control(what), tensor).wait()
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0, among: RankLink | None = None) -> None:
        """Overwrite ``tensor`` on every rank of a link with the values of one of them. Collective.

        Args:
            tensor: On the device, of the same shape and dtype on all ranks.
            source: The rank within the link whose values count.
            among: The link; None is all ranks.
        """
        link = among or self._world
        if link.size > 1 and tensor.numel():
            self._count("broadcast", tensor.numel())
            # The global rank: torch 2.6 takes no rank within the group here.
            first = dist.get_global_rank(link.gather_group, source)
            work = dist.broadcast(tensor, first, group=link.gather_group, async_op=True)
            Work(work, *self._control("broadcasts values of rank 0"), tensor).wait()

    def exchange(self, value: object, what: str = "exchanges values with the other ranks") -> list[Any]:
        """Return every rank's picklable ``value``, in rank order. Collective.

        ``what`` says what this rank does, for the message of a deadlock.
        """
        group = self._world.gather_group
        on_host = self.device.type == "cpu"
        return exchange_objects(value, self.world_size, group, *self._control(what), over_gloo=on_host)

    def gather_tensors(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Return every rank's tensor, in rank order; not counted as volume. Collective.

        Args:
            tensor: On the device; ranks may have other shapes and dtypes.
            what: What this rank does, for the message of a deadlock.
        """
        if self.world_size == 1:
            return [tensor]
        tensor = tensor.detach().contiguous()
        kinds = self.exchange((tensor.shape, tensor.dtype), what)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in kinds]
        # Bytes: gloo knows fewer dtypes than torch. All rows begin where any dtype may.
        room = 16 * (max(sizes) // 16 + 1)
        own = torch.zeros(room, dtype=torch.uint8, device=self.device)
        own[: sizes[self.rank]] = tensor.reshape(-1).view(torch.uint8)
        rows = torch.empty(self.world_size, room, dtype=torch.uint8, device=self.device)
        work = dist.all_gather(list(rows), own, group=self._world.gather_group, async_op=True)
        Work(work, *self._control(what), rows).wait()
        return [
            row[: -(-size // 16) * 16].view(dtype)[: shape.numel()].reshape(shape)
            for row, size, (shape, dtype) in zip(rows, sizes, kinds, strict=True)
        ]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            work = dist.barrier(group=self._world.gather_group, async_op=True)
            await_work(work, *self._control("waits at a barrier"))

    def close(self) -> None:
        """Release the process groups; the object cannot be used afterwards."""
        # What this method releases must not be released again by the next engine (_close_dropped).
        self._forsaken.detach()
        open_comms.discard(self)
        if self.link.shared is not None:
            self.link.shared.close()
        if dist.is_initialized():
            for group in self.own_groups:
                dist.destroy_process_group(group)
        self.own_groups.clear()
        for axis in self.axes.values():
            axis.close()
        for link in (self.link, self.data, self._world, *self._links.values()):
            link.release()
