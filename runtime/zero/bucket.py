"""Collects the gradients of one unit until they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto

from torch import Tensor

from .store import ShardStore
from .unit import Unit


class BucketState(IntEnum):
    """Says what a bucket holds of the present step."""

    EMPTY = auto()
    """Means that no gradient has come."""
    COLLECTING = auto()
    """Means that local gradients are added up, and that none has been sent."""
    REDUCED = auto()
    """Means that everything has been sent; a persistent bucket's own part becomes the sum over the ranks."""
    COLLECTING_AGAIN = auto()
    """Means that local gradients are added up, and that earlier ones have been sent."""


_ALLOWED = {
    BucketState.EMPTY: {BucketState.COLLECTING},
    BucketState.COLLECTING: {BucketState.REDUCED},
    BucketState.REDUCED: {BucketState.COLLECTING_AGAIN},
    BucketState.COLLECTING_AGAIN: {BucketState.REDUCED},
}
"""Lists the states that may follow each; every one may become EMPTY, at the end of a step."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Collects the gradients of one unit.

    ``tensor`` is flat with ``unit.numel`` elements. With persistent buckets (stages 0 and 1) it is fp32,
    local sums of the micro-batches stay in it, and this rank's part is the gradient. A transient one is lent
    from a pool, in the dtype that is sent, from a unit's first gradient until its reduction.
    """

    unit: Unit
    state: BucketState = BucketState.EMPTY
    is_collecting: bool = False
    """Tells that it holds gradients that have not been sent. It is kept, because each gradient asks."""
    order: int = 0
    tensor: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    """Tells which parameters' slices hold a gradient (and are added to); the others are uninitialized."""
    seen: list[bool] = field(default_factory=list)
    """Tells which parameters had a gradient since this backward pass began or the unit was last complete."""
    missing: int = 0
    carry: Tensor | None = None
    """Persistent: sums of an earlier backward pass of the same step, to be added to the next."""
    used: list[bool] = field(default_factory=list)
    """Tells which parameters had a gradient in the current step."""

    @property
    def store(self) -> ShardStore:
        """Return the store of the unit, which is trained."""
        assert self.unit.store is not None
        return self.unit.store

    @property
    def own(self) -> Tensor:
        """Return this rank's part of a persistent bucket."""
        assert self.tensor is not None
        return self.tensor[self.unit.start : self.unit.stop]

    def move(self, to: BucketState) -> None:
        assert to in _ALLOWED[self.state], f"bucket {self.unit.name}: {self.state.name} -> {to.name}"
        self._set(to)

    def empty(self) -> None:
        """Begin a step, with no gradient."""
        self._set(BucketState.EMPTY)

    def _set(self, state: BucketState) -> None:
        self.state = state
        self.is_collecting = state in (BucketState.COLLECTING, BucketState.COLLECTING_AGAIN)

    def await_all(self) -> None:
        """Note that every parameter's gradient is to come (once more)."""
        self.seen = [False] * len(self.unit.parameters)
        self.missing = len(self.seen)

    def set_tensor(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self.views, self.written = [], [False] * len(self.unit.parameters)
        if tensor is not None:
            slots = zip(self.unit.layout.slots, self.unit.shapes, strict=True)
            self.views = [tensor[s.offset : s.stop].view(shape) for s, shape in slots]
