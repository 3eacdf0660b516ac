"""Gathers ahead the block that followed last time: a hint, never a requirement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..comm.collectives import Comm
from .ownership import UnitState
from .saved_tensors import outside_transforms
from .unit_policy import Block


class OrderHint:
    """Remembers which block followed which in the last complete pass."""

    def __init__(self) -> None:
        self._now: list[int] = []
        self._after: dict[int, int] = {}
        self._last: int | None = None

    def visit(self, block: int) -> None:
        """Note that ``block`` is used now."""
        if not self._now or self._now[-1] != block:
            self._now.append(block)

    def after(self, block: int) -> int | None:
        """Return the block that followed ``block`` last time, or None."""
        return self._after.get(block)

    def is_last(self, block: int) -> bool:
        """Tell whether the last pass ended with ``block``."""
        return self._last == block

    def end(self) -> None:
        """End the pass, whose order becomes the hint."""
        if self._now:
            self._after = {}
            for current, following in zip(self._now, self._now[1:], strict=False):
                self._after.setdefault(current, following)
            self._last = self._now[-1]
        self._now = []


class Prefetch:
    """Starts gathers before their block is called."""

    def __init__(self, blocks: Sequence[Block], comm: Comm, *, enabled: bool, max_live_numel: int) -> None:
        """Limit the elements of sharded units that are unsharded at one time to ``max_live_numel``."""
        self._blocks, self._comm, self._enabled, self._max_live_numel = blocks, comm, enabled, max_live_numel

    def after(self, order: OrderHint, index: int) -> None:
        """Start to gather the block that comes next; two blocks where units have to be read from disk."""
        if not self._enabled:
            return
        following: int | None = index
        for ahead in itertools.count(1):
            following = order.after(following) if following is not None else None
            if following is None:
                return
            block = self._blocks[following]
            if any(unit.state is UnitState.SHARDED for unit in block.units):
                self._start(block)
            if ahead >= max((unit.values.blocks_ahead for unit in block.units), default=1):
                return

    def _start(self, block: Block) -> None:
        alone = self._comm.world_size == 1
        if alone and all(unit.values.is_gathered_directly for unit in block.units):
            return  # a local copy: starting it early gains nothing
        live = sum(
            unit.numel
            for other in self._blocks
            for unit in other.units
            if unit.shard_params and unit.state is not UnitState.SHARDED
        )
        if live + sum(unit.numel for unit in block.units) <= self._max_live_numel:
            with outside_transforms():
                for unit in block.units:
                    if unit.state is UnitState.SHARDED and unit.updated.ready:
                        unit.unshard(rounded=True)
