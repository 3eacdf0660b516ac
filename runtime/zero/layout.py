"""Computes, in pure integers, where parameters lie in a unit's flat buffer and which part each rank owns.

Note [Gaps are zero]. Parameters start at aligned elements, and a unit ends with padding. A slice that the
optimizer steps has the gaps between its parameters in it, so that it is one flat tensor. Gaps therefore take
part in sums of gradients, norms and updates, and must be zero in all of them: in values
(``Unit._adopt_values``), in buckets (``GradientReducer``) and in loaded state. Garbage in a bucket changes
the gradient norm of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..comm.link import ALIGN_NUMEL

TILE_NUMEL = 4 << 20
"""Limits the elements of a shard that are moved and updated together, as sub_group_size does: long transfers
run at a disk's full speed, and a few of them in memory cost little.
"""
TILE_ALIGN = 4096
"""Sets the multiple of elements at which tiles start, whole pages in every dtype."""
Range = tuple[int, int]
"""Holds the first and last-plus-one element within a unit's shard."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Describes the place of one parameter: elements ``offset`` to ``offset + numel`` of the flat buffer."""

    offset: int
    numel: int
    group: int
    """Index of the optimizer's param group, or -1 when no optimizer updates this parameter."""

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes a contiguous slice of one optimizer group inside a shard; ``start`` and ``stop`` count from
    the shard's start.
    """

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes a unit of ``numel`` elements (padding included) cut into ``world_size`` equal shards."""

    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the first and last-plus-one element that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges that belong to no parameter: alignment and the padding at the end."""
        found = []
        at = 0
        for slot in self.slots:
            if slot.offset > at:
                found.append((at, slot.offset))
            at = slot.stop
        if self.numel > at:
            found.append((at, self.numel))
        return found

    def overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return ``(slot index, from, to)``, flat coordinates, for each slot that meets [start, stop)."""
        found = []
        for index, slot in enumerate(self.slots):
            low = max(start, slot.offset)
            high = min(stop, slot.stop)
            if low < high:
                found.append((index, low, high))
        return found

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the parameters in [start, stop), joined into one slice per optimizer group, gaps inside it
        included.

        Slots are sorted by group, so a shard meets each group in at most one slice.
        """
        # Gaps between two parameters of a group stay inside its slice: see Note [Gaps are zero].
        runs: dict[int, Piece] = {}
        for index, low, high in self.overlaps(start, stop):
            group = self.slots[index].group
            if group >= 0:
                first = runs[group].start if group in runs else low - start
                runs[group] = Piece(group, first, high - start)
        return list(runs.values())


def make_layout(
    numels: Sequence[int], groups: Sequence[int], world_size: int, align: int = ALIGN_NUMEL, pieces: int = 0
) -> Layout:
    """Lay parameters out in the given order, which must have equal ``groups`` adjacent.

    Each starts at a multiple of ``align``; the whole is padded so that ``world_size`` aligned shards fit
    exactly, or as many aligned ``pieces``, a multiple of that.
    """
    slots: list[Slot] = []
    at = 0
    for numel, group in zip(numels, groups, strict=True):
        at = -(-at // align) * align
        slots.append(Slot(at, numel, group))
        at += numel
    # Every rank must have the same number of elements, and each piece in which a unit travels must begin
    # aligned.
    quantum = align * (pieces or world_size)
    return Layout(tuple(slots), max(quantum, -(-at // quantum) * quantum), world_size)


def tile_ranges(numel: int, tile_numel: int) -> list[Range]:
    """Cut ``[0, numel)`` into ranges of at most ``tile_numel`` elements, from multiples of TILE_ALIGN on."""
    step = max(TILE_ALIGN, tile_numel // TILE_ALIGN * TILE_ALIGN)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def cuts_of(pieces: Sequence[Range], numel: int, tile_numel: int) -> list[Range]:
    """Cut the pieces of a shard at tile borders, into the ranges that norms are summed over."""
    # At tile borders also where a shard is in one memory: sums over the same ranges have the same bits
    # wherever a gradient lies, and so has the norm.
    tiles = tile_ranges(numel, tile_numel)
    return [
        (max(start, low), min(stop, high))
        for start, stop in pieces
        for low, high in tiles
        if start < high and stop > low
    ]
