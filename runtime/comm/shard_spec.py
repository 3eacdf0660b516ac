"""Describes which shard of a parameter this rank has where the ranks of an axis share its computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

Box = tuple[tuple[tuple[int, int], ...], ...]
"""Holds, for each dimension of a tensor, the ranges of indices that belong to a shard."""
_MARK = "zlaunch_shard_spec"


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Describes how a tensor of ``shape`` is sharded over the ranks of an axis."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The shard of each rank of the axis, all of one shape; several ranks may have equal ones."""
    position: int
    """This rank's place on the axis."""
    gather: Callable[[Tensor], list[Tensor]] | None = field(compare=False)
    """Returns the shards of all ranks of the axis, in their order. Collective for them."""
    of_experts: bool = False
    """Tells that ranks with other samples have other shards."""

    def __deepcopy__(self, memo: Any) -> ShardSpec:
        return self

    @property
    def box(self) -> Box:
        """Return this rank's shard."""
        return self.boxes[self.position]

    @property
    def numel(self) -> int:
        """Return the number of elements of a shard, equal on all ranks: units are planned by it."""
        return prod(box_shape(self.box))

    @property
    def copies(self) -> int:
        """Return how many ranks of the axis have this rank's shard."""
        return self.boxes.count(self.box)

    @property
    def copy_index(self) -> int:
        """Return this rank's place among those that have its shard."""
        return self.boxes[: self.position].count(self.box)

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor, a copy."""
        return take(full, self.box).clone()

    def unshard(self, shard: Tensor) -> Tensor:
        """Gather the full tensor from the shards of the axis. Collective for its ranks."""
        assert self.gather is not None
        shards = self.gather(shard.detach().contiguous())
        full = shard.new_empty(self.shape)
        for box, values in zip(self.boxes, shards, strict=True):
            put(full, box, values)
        return full


def spec_of(parameter: Tensor) -> ShardSpec | None:
    """Return how a parameter is sharded over an axis; None for a parameter that is not."""
    return getattr(parameter, _MARK, None)


def set_spec(parameter: Tensor, spec: ShardSpec) -> None:
    """Note on a parameter, which is this rank's shard already, how it is sharded."""
    setattr(parameter, _MARK, spec)


def shard_numel(parameter: Tensor, shape: torch.Size) -> int:
    """Return the elements of a parameter on a rank that has it, which may be another than this one."""
    spec = spec_of(parameter)
    return shape.numel() if spec is None else spec.numel


def full_shape(parameter: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the full shape of a parameter, of which this rank has ``shape``."""
    spec = spec_of(parameter)
    return tuple(shape) if spec is None else spec.shape


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple(((0, size),) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a shard."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in box)


def take(full: Tensor, box: Box) -> Tensor:
    """Return the elements of a box; a view where each dimension has one range."""
    for dim, ranges in enumerate(box):
        pieces = [full.narrow(dim, start, stop - start) for start, stop in ranges]
        full = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return full


def put(full: Tensor, box: Box, shard: Tensor) -> None:
    """Write the elements of a box into a full tensor."""
    for target, local in _pieces(box):
        full[target] = shard[local]


def _pieces(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the contiguous pieces of a box: where each is in the full tensor, and where in the shard."""
    if not box:
        yield (), ()
        return
    *before, last = box
    for outer, inner in _pieces(tuple(before)):
        at = 0
        for start, stop in last:
            yield (*outer, slice(start, stop)), (*inner, slice(at, at + stop - start))
            at += stop - start
