"""Describes which part of a parameter this rank has where the ranks of an axis share its computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

Box = tuple[tuple[tuple[int, int], ...], ...]
"""Holds, for each dimension of a tensor, the ranges of indices that belong to a part."""
_MARK = "zlaunch_cut"


@dataclass(frozen=True, slots=True)
class Cut:
    """Describes how a tensor of ``shape`` is cut into the parts of an axis of ranks."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The part of each rank of the axis, all of one shape; several ranks may have equal ones."""
    position: int
    """This rank's place on the axis."""
    gather: Callable[[Tensor], list[Tensor]] | None = field(compare=False)
    """Returns the parts of all ranks of the axis, in their order. Collective for them."""
    of_experts: bool = False
    """Tells that ranks with other samples have other parts."""

    # A copy of a model is cut in the same way, and computes with the same ranks.
    def __deepcopy__(self, memo: Any) -> Cut:
        return self

    @property
    def box(self) -> Box:
        """Return this rank's part."""
        return self.boxes[self.position]

    @property
    def numel(self) -> int:
        """Return the number of elements of a part, equal on all ranks: units are planned by it."""
        return prod(box_shape(self.box))

    @property
    def copies(self) -> int:
        """Return how many ranks of the axis have this rank's part."""
        return self.boxes.count(self.box)

    @property
    def copy_index(self) -> int:
        """Return this rank's place among those that have its part."""
        return self.boxes[: self.position].count(self.box)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, a copy."""
        return take(whole, self.box).clone()

    def whole(self, part: Tensor) -> Tensor:
        """Gather the whole tensor from the parts of the axis. Collective for its ranks."""
        assert self.gather is not None
        parts = self.gather(part.detach().contiguous())
        whole = part.new_empty(self.shape)
        for box, values in zip(self.boxes, parts, strict=True):
            put(whole, box, values)
        return whole


def cut_of(parameter: Tensor) -> Cut | None:
    """Return how a parameter is cut; None for one that every rank has whole."""
    return getattr(parameter, _MARK, None)


def mark(parameter: Tensor, cut: Cut) -> None:
    """Note on a parameter, which is this rank's part already, how it is cut."""
    setattr(parameter, _MARK, cut)


def part_numel(parameter: Tensor, shape: torch.Size) -> int:
    """Return the elements of a parameter on a rank that has it, which may be another than this one."""
    cut = cut_of(parameter)
    return shape.numel() if cut is None else cut.numel


def whole_shape(parameter: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the whole of a parameter, of which this rank has ``shape``."""
    cut = cut_of(parameter)
    return tuple(shape) if cut is None else cut.shape


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple(((0, size),) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in box)


def take(whole: Tensor, box: Box) -> Tensor:
    """Return the elements of a box; a view where each dimension has one range."""
    for dim, ranges in enumerate(box):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return whole


def put(whole: Tensor, box: Box, part: Tensor) -> None:
    """Write the elements of a box into a whole tensor."""
    for target, own in _pieces(box):
        whole[target] = part[own]


def _pieces(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the contiguous pieces of a box: where each is in the whole, and where in the part."""
    if not box:
        yield (), ()
        return
    *before, last = box
    for outer, inner in _pieces(tuple(before)):
        at = 0
        for start, stop in last:
            yield (*outer, slice(start, stop)), (*inner, slice(at, at + stop - start))
            at += stop - start
