"""Runs collectives in two hops: in a group of neighbouring ranks, and between equal places of all groups.

A reduction sums inside the group first, so that between groups only a part of the elements travels, one of as
many as the group has ranks. Units are sharded in one of two ways:

- over the group (MiCS, arXiv 2205.00119): all groups keep equal shards, whose gradients are all-reduced
  between the groups; gathers stay inside;
- over all ranks (ZeRO++ hpZ, arXiv 2306.10209): a gather fills this rank's part of a copy that the group
  keeps in common, between the groups, and then the whole from that copy, inside. The copy serves until the
  values change: of two gathers in a step, only the first goes between the groups.
  A copy of rounded values serves no gather that has to be exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.link import Note, RankLink
from ..comm.pending import Pending
from ..comm.waits import waits
from .hops import Hop, OnStream, Relay, advance_until
from .packed_link import PackedLink

INSIDE, BETWEEN = "inside", "between"
_Key = tuple[int, bool]
"""Identifies a copy: a unit's label, and whether it is rounded."""


class TwoHops(RankLink):
    """Joins an ``inner`` link, of a group, and an ``outer`` one, of the ranks with the same place in every
    group. Tensors that are sent must come from the inner link's memory, if that is shared.

    Attributes
        over_all: units are sharded over all ranks, else over the group.
    """

    def __init__(self, world: RankLink, inner: PackedLink, outer: PackedLink, *, over_all: bool) -> None:
        super().__init__(world.device, inner.size, inner.position, None, None)
        self.world, self.inner, self.outer, self.over_all = world, inner, outer, over_all
        self.shared = inner.shared
        self.pieces = max(inner.pieces * outer.size, outer.pieces * inner.size)
        if over_all:
            # the parts of a group's member are neighbours: the copy of its slice is filled by one collective
            self.shards = inner.size * outer.size
            self.position = inner.position * outer.size + outer.position
        self._moved_by_all = 0
        self._copies: dict[_Key, Tensor] = {}
        """Keeps this rank's slice of units that are gathered again and again. Until the next drain, others of
        the group may read it, so it gets no other values before: rounded ones have memory of their own.
        """
        self._valid: set[_Key] = set()
        """Lists the copies that have the present values."""
        self._dropped: list[Tensor] = []
        """Keeps copies that no rank reads any more after the next drain."""
        self._gathers, self._reductions = Relay(self.advance), Relay(self.advance)
        waits.helpers.add(self)
        self._sides: dict[int, torch.cuda.Stream] = {}

    def rounds(self, trained: bool) -> bool:
        return (self.outer if self.over_all else self.inner).rounds(trained)

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        if not self.over_all:
            hops = [lambda: self.inner.all_gather(full, source, label, note, rounded)]
            return self._run(self._gathers, hops, note, full)
        s, key = source.numel(), (label, rounded)
        part = full.numel() // self.inner.size
        in_place = source.data_ptr() == full[self.position * s :].data_ptr()
        if in_place:
            mine = full[self.inner.position * part : (self.inner.position + 1) * part]
        else:
            mine = self._copy(key, part, full.dtype)
        hops = [lambda: self.inner.all_gather(full, mine, label, note)]
        if in_place or key not in self._valid:
            own = mine[self.outer.position * s : (self.outer.position + 1) * s]
            if not in_place:
                self._valid.add(key)
                own.copy_(source, non_blocking=True)
            hops.insert(0, lambda: self.outer.all_gather(mine, own, label, note, rounded))
        return self._run(self._gathers, hops, note, full)

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        numel, dtype = bucket.numel() // self.inner.size, self.inner.reduced_dtype(bucket.dtype)
        part = torch.empty(numel, dtype=dtype, device=bucket.device)
        # what travels has the width of what the caller sends
        sent = part if dtype == bucket.dtype else torch.empty_like(part, dtype=bucket.dtype)
        # gloo's own all-reduce is slower than two collectives, and none quantises
        direct = self.device.type != "cpu" and not self.outer.quantization.gradient_bits
        piece = torch.empty(numel // self.outer.size, dtype=dtype, device=bucket.device)

        def between() -> Pending:
            if sent is not part:
                sent.copy_(part)
            if self.over_all:
                return self.outer.reduce_scatter(shard, sent, label, note)
            if direct:
                return self.outer.all_reduce(sent, label, note).then(lambda: shard.copy_(sent))
            return self.outer.reduce_scatter(piece, sent, label, note)

        hops = [lambda: self.inner.reduce_scatter(part, bucket, label, note), between]
        if not direct and not self.over_all:

            def back() -> Pending:
                own = self.outer.part_of(sent).copy_(piece)
                return self.outer.all_gather_sums(sent, own, label, note).then(lambda: shard.copy_(sent))

            hops.append(back)
        return self._run(self._reductions, hops, note, bucket, part, sent, piece)

    def all_reduce(self, tensor: Tensor, label: int, note: Note) -> Pending:
        """Start to sum ``tensor`` over all ranks in place, in one hop."""
        self._moved_by_all += 2 * tensor.nbytes
        return self.world.all_reduce(tensor, label, note)

    def reduced_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.outer.reduced_dtype(dtype) if self.over_all else self.inner.reduced_dtype(dtype)

    def changed(self, label: int) -> None:
        self._valid -= {(label, False), (label, True)}

    def forget(self, label: int) -> None:
        """Drop what is kept of a labelled tensor; what other ranks may be reading, at the next drain."""
        self.changed(label)
        for rounded in (False, True):
            if (label, rounded) in self._copies:
                self._dropped.append(self._copies.pop((label, rounded)))
        for link in (self.inner, self.outer):
            link.forget(label)

    def forget_errors(self) -> None:
        """Forget what quantisation has lost so far."""
        for link in (self.inner, self.outer):
            link.forget_errors()

    def drop_copies(self) -> None:
        """Release the memory of copies until the next gather. All ranks must call it, after :meth:`drain`."""
        self._drop(list(self._copies))

    def _drop(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            self._valid.discard(key)
            if self.shared is None:
                self._copies.pop(key, None)
            elif key in self._copies:
                self.shared.release(self._copies[key].untyped_storage())

    @property
    def moved(self) -> dict[str, int]:
        """Return the bytes of collectives in each class of links, by the rules of ``Comm.moved``."""
        return {INSIDE: self.inner.moved, BETWEEN: self.outer.moved + self._moved_by_all}

    def release(self) -> None:
        for link in (self.inner, self.outer):
            link.release()

    def drain(self) -> None:
        """Finish all second hops, and what other ranks read here."""
        advance_until(lambda: self._gathers.is_empty and self._reductions.is_empty, self.advance)
        super().drain()
        # passes use rounded copies of these units; exact ones were made for a script that has looked
        self._drop([(label, False) for label, is_rounded in self._copies if is_rounded])
        for copy in self._dropped:
            if self.shared is not None:
                self.shared.release(copy.untyped_storage())
        self._dropped.clear()

    def _copy(self, key: _Key, numel: int, dtype: torch.dtype) -> Tensor:
        copy = self._copies.get(key)
        if copy is None:
            if self.shared is not None:
                copy = self.shared.empty(numel, dtype)
            else:
                copy = torch.empty(numel, dtype=dtype, device=self.device)
            self._copies[key] = copy
        return copy

    def _run(self, relay: Relay, hops: Sequence[Hop], note: Note, *keep: Tensor) -> Pending:
        if self.device.type == "cpu":
            return relay.add(hops, note)
        side = self._sides.get(id(relay))
        if side is None:
            side = self._sides[id(relay)] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return OnStream(side, hops, *keep)

    def advance(self) -> None:
        """Begin what other ranks may wait for, and read what they have sent, without waiting."""
        self._gathers.advance()
        self._reductions.advance()
        if self.shared is not None:
            self.shared.progress()
