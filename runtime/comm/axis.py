"""Defines an axis of the mesh: its ranks, their process groups, and the collectives between them.

Note [Channels]
    Every collective of an axis belongs to a channel. The channel says which process group runs it, under
    which key ``comm.moved`` counts its elements, and what the deadlock watch calls it. The watch finds ranks
    that wait for each other by their channels: what one rank may wrongly call alone (a state, a check) needs
    another channel than what layers compute, and a group whose collectives meet no others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ParameterError
from .collectives import Comm
from .link import reduce_scatter_flat
from .pending import Pending, Work, waits

PASSES = "passes"
"""Names the group that the passes of the model use."""
STATES = "states"
"""Names the group that gathers parameters, which one rank may ask for alone."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Describes one kind of collective on an axis: see Note [Channels]."""

    name: str
    """Identifies the channel for the deadlock watch."""
    what: str
    """Says what a rank does in such a collective, for the watch's error."""
    counter: str = ""
    """The key in ``comm.moved``; without one, the collective is not counted as volume."""
    group: Hashable = PASSES
    """The use of the process group, as :meth:`Axis.make_group` names it."""


class Axis:
    """Runs the collectives of the ranks that differ in their position on one axis of the mesh alone.

    The communicator owns the axis as ``comm.axes[name]`` and closes it. A model that outlives its engine then
    keeps none of the groups' threads and descriptors.
    """

    def __init__(self, comm: Comm, name: str) -> None:
        """Find the ranks of the axis; :meth:`make_group` makes the process groups. ``name`` is a key of
        ``parallel`` in the config.
        """
        self.comm = comm
        self.name = name
        self.ranks = comm.mesh.ranks_along(name, comm.rank)
        """The global ranks, by their position on the axis."""
        self.size = len(self.ranks)
        self.rank = self.ranks.index(comm.rank)
        """This rank's position on the axis."""
        self.last_copy: tuple[weakref.ref[Tensor], Hashable, Tensor] | None = None
        """The last value that ``parallel.collectives.copy_to`` got, when, and its copy."""
        self.follow: Callable[[Tensor, Tensor | None], None] | None = None
        """Gets what ``parallel.collectives`` makes: a shard and the replicated value that it comes from, or a
        replicated value and None.
        """
        self._groups: dict[Hashable, Any] = {}

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copy of a model computes with the same ranks

    def make_group(self, use: Hashable, *, along: Sequence[str] = (), places: Sequence[int] = ()) -> None:
        """Make the process groups for a use, one for each set of ranks of the axis, and keep this rank's.
        Collective for all ranks of the world.

        Args:
            use: Name of the use in :attr:`Channel.group`.
            along: Further axes on which the ranks of a group differ.
            places: Positions that belong to the group, by default all. Other ranks have no group.
        """
        found = None
        for ranks in self.comm.mesh.groups(self.name, *along):
            members = [ranks[place] for place in places] if places else ranks
            group = self.comm.new_group(members)
            if self.comm.rank in members:
                found = group
        self._keep(use, found)

    def share_group(self, use: Hashable) -> None:
        """Use the group of the passes for another use as well."""
        self._keep(use, self.group)

    def _keep(self, use: Hashable, group: Any) -> None:
        self.comm.axes[self.name] = self
        self._groups[use] = group

    def has_group(self, use: Hashable) -> bool:
        """Tell whether groups were made for a use."""
        return use in self._groups

    def group_for(self, use: Hashable) -> Any:
        """Return this rank's group for a use; None where it is in none. Raises ParameterError once the engine
        has been destroyed: torch would take all ranks for a group that is None.
        """
        if use not in self._groups:
            raise ParameterError(
                f"the model holds only this rank's shard (parallel.{self.name}), and its engine was "
                "destroyed: save the weights before that, then rebuild the model and load them"
            )
        return self._groups[use]

    @property
    def group(self) -> Any:
        """Return the group that the passes of the model use."""
        return self.group_for(PASSES)

    @property
    def is_open(self) -> bool:
        """Tell whether the axis has groups: the engine lives."""
        return bool(self._groups)

    def close(self) -> None:
        """Let go of the groups, which have ended."""
        self._groups.clear()

    # -- collectives --------------------------------------------------------------------------------

    def sum(self, tensor: Tensor, channel: Channel) -> Tensor:
        """Sum a contiguous tensor in place over the ranks; return it."""
        self.begin_sum(tensor, channel).wait()
        return tensor

    def begin_sum(self, tensor: Tensor, channel: Channel) -> Pending:
        """Begin to sum a contiguous tensor in place over the ranks."""
        if channel.counter:
            self.comm._count(channel.counter, 2 * tensor.numel())
        group = self.group_for(channel.group)
        return self._begun(dist.all_reduce(tensor, group=group, async_op=True), channel, tensor)

    def max(self, tensor: Tensor, channel: Channel) -> Tensor:
        """Replace each element of a contiguous tensor by the largest of the ranks, in place; return it."""
        if channel.counter:
            self.comm._count(channel.counter, 2 * tensor.numel())
        group = self.group_for(channel.group)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
        self._begun(work, channel, tensor).wait()
        return tensor

    def all_gather(self, shard: Tensor, channel: Channel) -> list[Tensor]:
        """Return the shards of all ranks of the group, in their order. ``shard`` is contiguous."""
        group = self.group_for(channel.group)
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        if channel.counter:
            self.comm._count(channel.counter, shard.numel() * len(shards))
        self._begun(dist.all_gather(shards, shard, group=group, async_op=True), channel, shard).wait()
        return shards

    def reduce_scatter(self, rows: Tensor, channel: Channel) -> Tensor:
        """Return this rank's share of the rows of the ranks' sum; each rank gets as many."""
        found, work = self.begin_reduce_scatter(rows, channel)
        work.wait()
        return found

    def begin_reduce_scatter(self, rows: Tensor, channel: Channel) -> tuple[Tensor, Pending]:
        """Begin to sum this rank's share of the rows, which is returned, over the ranks."""
        found = rows.new_empty((len(rows) // self.size, *rows.shape[1:]))
        if rows.device.type == "cpu":  # gloo's own is an all-reduce, twice the bytes
            received, work = self._begin_all_to_all(rows, channel)
            pieces = received.view(self.size, *found.shape)
            return found, work.then(lambda: torch.sum(pieces, 0, out=found))
        rows = rows.contiguous()
        if channel.counter:
            self.comm._count(channel.counter, rows.numel())
        begun = reduce_scatter_flat(found, rows, group=self.group_for(channel.group), async_op=True)
        return found, self._begun(begun, channel, rows)

    def all_to_all(
        self,
        rows: Tensor,
        channel: Channel,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Send consecutive rows to each rank; return the rows that the ranks have sent.

        Args:
            rows: The rows to send, by default as many to each rank. Those to this rank itself are counted.
            sent: Number of rows to each rank.
            received: Number of rows from each rank; given together with ``sent``.
        """
        found, work = self._begin_all_to_all(rows, channel, sent, received)
        work.wait()
        return found

    def _begin_all_to_all(
        self,
        rows: Tensor,
        channel: Channel,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> tuple[Tensor, Pending]:
        rows = rows.contiguous()
        if channel.counter:
            self.comm._count(channel.counter, rows.numel())
        total = len(rows) if received is None else sum(received)
        found = rows.new_empty((total, *rows.shape[1:]))
        work = dist.all_to_all_single(
            found,
            rows,
            None if received is None else list(received),
            None if sent is None else list(sent),
            group=self.group_for(channel.group),
            async_op=True,
        )
        return found, self._begun(work, channel, found, rows)

    def broadcast(self, tensor: Tensor, source: int, channel: Channel) -> Tensor:
        """Overwrite a contiguous tensor with the one at a position of the axis; return it."""
        if channel.counter:
            self.comm._count(channel.counter, tensor.numel())
        flat = tensor.view(-1).view(torch.uint8)
        group = self.group_for(channel.group)
        work = dist.broadcast(flat, self.ranks[source], group=group, async_op=True)
        self._begun(work, channel, flat).wait()
        return tensor

    def _begun(self, work: Any, channel: Channel, *tensors: Tensor) -> Pending:
        """Return a collective that has begun, which keeps its tensors until somebody has waited for it."""
        return Work(work, waits.next_key(self.comm.number, channel.name), channel.what, *tensors)
