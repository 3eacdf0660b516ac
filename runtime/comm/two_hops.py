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

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...cuda_ops.quantize import (
    BLOCK,
    dequantize,
    dequantize_sum,
    packed_bytes,
    quantize,
    quantize_with_error,
)
from .link import ALIGN_NUMEL, Note, RankLink
from .pending import DONE, Pending, Work, waits

# -- hops -------------------------------------------------------------------------------------------
#
# Begins each hop of a collective when the one before is over.


_PAUSE_S = 0.0002
_LOOK_S = 1.0

Hop = Callable[[], Pending]
"""Starts one hop."""


class Relay:
    """Begins the hops of collectives on a CPU, each when the one before is over. No collective begins a hop
    before those that were begun earlier have begun theirs: that order is common to all ranks, while the order
    in which hops end is not.
    """

    def __init__(self, advance_all: Callable[[], None]) -> None:
        """Take what advances this relay and everything else that other ranks may wait for."""
        self._advance_all = advance_all
        self._queue: deque[_Relayed] = deque()

    def add(self, hops: Sequence[Hop], note: Note) -> Pending:
        """Begin a collective."""
        relayed = _Relayed(hops, note, self._advance_all)
        self._queue.append(relayed)
        self.advance()
        return relayed

    def advance(self) -> None:
        """Begin what can be begun, without waiting."""
        before: _Relayed | None = None
        for relayed in list(self._queue):
            # Fewer hops left than here: the collective before this one has begun the hop that this one begins
            # now.
            while relayed.left and (before is None or len(before.left) < len(relayed.left)):
                if not relayed.present.ready:
                    break
                relayed.begin_next()
            before = relayed
        while self._queue and not self._queue[0].left:
            self._queue.popleft()

    @property
    def is_empty(self) -> bool:
        """Tell whether all hops have begun."""
        return not self._queue


class _Relayed(Pending):
    __slots__ = ("_advance_all", "_note", "left", "present")

    def __init__(self, hops: Sequence[Hop], note: Note, advance_all: Callable[[], None]) -> None:
        self.left = deque(hops)
        self.present = DONE
        self._note = note
        self._advance_all = advance_all

    def begin_next(self) -> None:
        # It has ended. This runs what follows it (then), such as the sum of its pieces.
        self.present.wait()
        self.present = self.left.popleft()()

    @property
    def ready(self) -> bool:
        self._advance_all()
        return not self.left and self.present.ready

    def wait(self) -> None:
        with waits.waiting(*self._note):
            advance_until(lambda: self.ready, self._advance_all)
            self.present.wait()


def advance_until(over: Callable[[], bool], advance: Callable[[], None]) -> None:
    """Advance everything until ``over()``. Raises RankMismatchError once the wait is known to be in vain."""
    look = time.monotonic() + _LOOK_S
    while not over():
        advance()
        # A gloo Work has nothing to wait for beside other sources, so its end is polled.
        time.sleep(_PAUSE_S)
        if time.monotonic() > look:
            waits.check()
            look = time.monotonic() + _LOOK_S


def follow(side: torch.cuda.Stream) -> None:
    """Let a stream wait for what the current stream has been given."""
    side.wait_stream(torch.cuda.current_stream(side.device))


class OnStream(Pending):
    """Represents hops that follow each other on a stream of a GPU, which the host does not wait for."""

    def __init__(self, side: torch.cuda.Stream, hops: Sequence[Hop], *keep: Tensor) -> None:
        """Start the hops, after what the current stream has been given; ``keep`` lives until they are over
        for the stream that waits.
        """
        follow(side)
        with torch.cuda.stream(side):
            for hop in hops:
                hop().wait()
            self.work = torch.cuda.Event()  # type: ignore[no-untyped-call]
            """Lets a stream wait for the hops, without an end of what is kept for them."""
            self.work.record(side)
        self._keep = keep

    def wait(self) -> None:
        waits.on_stream(self.work.wait)
        self._keep = ()


# -- packed link ------------------------------------------------------------------------------------
#
# Runs the collectives of a group of ranks, counts their bytes, and packs what is quantised.


_BITS = 8
"""Bits of gathers: of parameters, and of the sums that reductions have left."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Says what a group sends in blocks of few bits (ZeRO++, arXiv 2306.10209)."""

    weights: bool = False
    """Gathers of trained parameters, in 8 bits."""
    frozen: bool = False
    """Gathers of frozen parameters, in 8 bits."""
    gradient_bits: int = 0
    """Bits of reductions; 0 sends them as they are."""
    beta: float | None = None
    """The part of the old error that LoCo keeps (arXiv 2407.04480); None is without error feedback."""
    reset_every: int = 0
    """Reductions of a unit after which its error is forgotten."""

    @property
    def any(self) -> bool:
        """Tell whether anything is quantised."""
        return self.weights or self.frozen or self.gradient_bits > 0


UNPACKED = Quantization()
"""Sends everything as it is."""


class PackedLink(RankLink):
    """Runs the collectives of a group.

    Through shared memory nothing is quantised: there a rank reads what the others have in place.

    Attributes
        moved: the bytes of its collectives, by the rules of ``Comm.moved``, packed where they are packed.
    """

    def __init__(self, plain: RankLink, quantization: Quantization) -> None:
        """Take over the process groups of ``plain``."""
        super().__init__(plain.device, plain.size, plain.position, plain.gather_group, plain.reduce_group)
        self.quantization = quantization
        if quantization.any:
            self.pieces = self.size * (BLOCK // ALIGN_NUMEL)  # no block crosses the end of a piece
        self.moved = 0
        self._errors: dict[int, Tensor] = {}
        """Keeps what quantisation has lost of each unit's gradients, by label."""
        self._count: dict[int, int] = {}

    def _add(self, nbytes: int) -> None:
        self.moved += nbytes if self.size > 1 else 0

    @property
    def gathers_on_any_stream(self) -> bool:
        return super().gathers_on_any_stream and not (self.rounds(True) or self.rounds(False))

    def rounds(self, trained: bool) -> bool:
        if self.shared is not None or self.size == 1:
            return False
        return self.quantization.weights if trained else self.quantization.frozen

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        if rounded:
            return self._gather_packed(full, source, label, note)
        self._add(full.nbytes)
        return super().all_gather(full, source, label, note)

    def all_gather_sums(self, full: Tensor, source: Tensor, label: int, note: Note) -> Pending:
        """Start to fill ``full`` from what reductions have left in every member's ``source``, in 8 bits if
        reductions are quantised.
        """
        return self.all_gather(full, source, label, note, self.quantization.gradient_bits > 0)

    def _gather_packed(self, full: Tensor, source: Tensor, label: int, note: Note) -> Pending:
        s = source.numel()
        n = packed_bytes(s, bits=_BITS)
        rows = torch.empty(self.size * n, dtype=torch.uint8, device=self.device)
        own = self.part_of(rows)
        quantize(source, own, bits=_BITS)
        self._add(rows.nbytes)

        def unpack() -> None:
            # Also this rank's own part: all ranks have to compute with equal values.
            dequantize(rows.view(self.size, n), full, bits=_BITS)

        return super().all_gather(rows, own, label, note).then(unpack)

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        bits = self.quantization.gradient_bits
        s = bucket.numel() // self.size
        if not bits or self.size == 1 or self.shared is not None:
            self._add(bucket.nbytes)
            return super().reduce_scatter(shard, bucket, label, note)
        packed = torch.empty(self.size, packed_bytes(s, bits=bits), dtype=torch.uint8, device=bucket.device)
        error = self._error(bucket, label)
        if error is None:
            quantize(bucket, packed, bits=bits)
        else:
            quantize_with_error(bucket, error, packed, bits=bits, beta=self.quantization.beta or 0.0)
        self._add(packed.nbytes)
        got = torch.empty_like(packed)
        sent = dist.all_to_all_single(got, packed, group=self.reduce_group, async_op=True)
        return Work(sent, *note, packed).then(lambda: dequantize_sum(got, shard, bits=bits))

    def all_reduce(self, tensor: Tensor, label: int, note: Note) -> Pending:
        self._add(2 * tensor.nbytes)
        return super().all_reduce(tensor, label, note)

    def forget(self, label: int) -> None:
        self._errors.pop(label, None)

    def forget_errors(self) -> None:
        """Forget what quantisation has lost so far."""
        self._errors.clear()

    def _error(self, bucket: Tensor, label: int) -> Tensor | None:
        """Return the error of a unit, zeros at first and every so often; None without error feedback."""
        if self.quantization.beta is None:
            return None
        error = self._errors.get(label)
        count = self._count.get(label, 0)
        if error is None or error.dtype != bucket.dtype:  # passes that are added up are sent in fp32
            error = self._errors[label] = torch.zeros_like(bucket)
        elif count % self.quantization.reset_every == 0:
            error.zero_()
        self._count[label] = count + 1
        return error


# -- two hops ---------------------------------------------------------------------------------------


INSIDE = "inside"
BETWEEN = "between"
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
        self.world = world
        self.inner = inner
        self.outer = outer
        self.over_all = over_all
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
        self._gathers = Relay(self.advance)
        self._reductions = Relay(self.advance)
        waits.helpers.add(self)
        self._sides: dict[int, torch.cuda.Stream] = {}

    @property
    def gathers_on_any_stream(self) -> bool:
        return False  # the first hop allocates a buffer

    def rounds(self, trained: bool) -> bool:
        return (self.outer if self.over_all else self.inner).rounds(trained)

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        if not self.over_all:
            hops = [lambda: self.inner.all_gather(full, source, label, note, rounded)]
            return self._run(self._gathers, hops, note, full)
        s = source.numel()
        key = (label, rounded)
        part = full.numel() // self.inner.size
        in_place = source.data_ptr() == full[self.position * s :].data_ptr()
        if in_place:
            mine = full[self.inner.position * part : (self.inner.position + 1) * part]
        else:
            mine = self._copy(key, part, full.dtype)
        hops = [lambda: self.inner.all_gather(full, mine, label, note)]
        # In place, the source lies in `full` itself, so there is no copy that could have the values.
        if in_place or key not in self._valid:
            own = mine[self.outer.position * s : (self.outer.position + 1) * s]
            if not in_place:
                # When the gather begins, not when it ends: a later gather begins its hop inside the group
                # behind this one's.
                self._valid.add(key)
                own.copy_(source, non_blocking=True)
            hops.insert(0, lambda: self.outer.all_gather(mine, own, label, note, rounded))
        return self._run(self._gathers, hops, note, full)

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        numel = bucket.numel() // self.inner.size
        dtype = self.inner.reduced_dtype(bucket.dtype)
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
            # Shared memory is never freed, so the tensor stays for the next gather and only its pages go.
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
        # Before the drain: other ranks may wait for a hop that has not begun here.
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
