"""Runs the whole optimizer step of all units at once, where ranks have to work together in it."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Pending, Work, waits
from ..device import stream_mark
from ..zero.layout import Range
from ..zero.store import Access, OpenTile, ShardStore, TileView, open_tiles
from ..zero.unit import Unit
from .slices import ShardSlice
from .step import StepMethod
from .update_rule import State, UpdateRule

# -- parts ------------------------------------------------------------------------------------------
#
# Shows the parts of parameters that a rank steps, tile by tile, in whatever memory they are.


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPart:
    """Describes a slice's elements of its one parameter, without padding."""

    slice: ShardSlice
    index: int
    """Numbers the parameter in its unit."""
    low: int
    high: int
    """Bound the elements in the unit's flat buffer."""

    @property
    def unit(self) -> Unit:
        """Return the unit of the parameter."""
        return self.slice.unit

    @property
    def group(self) -> int:
        """Return the index of the parameter's group."""
        return self.slice.group

    @property
    def offset(self) -> int:
        """Return where in its parameter the part begins."""
        return self.low - self.unit.layout.slots[self.index].offset

    def of(self, tile: TileView, tensor: Tensor) -> Tensor:
        """Return the part's elements of a flat tensor over the tile."""
        start = self.low - self.unit.start - tile.start
        return tensor[start : start + self.high - self.low]

    def states(self, tile: TileView, state: State, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the part's elements of the optimizer's state, by name; zeros where a name is new. ``names``
        are sorted.
        """
        part = self.slice
        if part.leaf is None:
            # Regions of a tile belong to names in sorted order. With other names, a region has the content of
            # another state.
            if part.on_disk != list(names):
                former = {name: value.clone() for name, value in part.tensors_in(tile, state).items()}
                for name, region in zip(names, tile.state, strict=False):
                    kept = region[part.span(tile)]
                    kept.copy_(former[name]) if name in former else kept.zero_()
                part.on_disk = list(names)
        else:
            own = state.setdefault(part.leaf, {})
            for name in names:
                if name not in own:
                    own[name] = torch.zeros_like(part.leaf.detach())
        found = part.tensors_in(tile, state)
        return {name: self.inside(found[name]) for name in names}

    def is_in(self, tile: TileView) -> bool:
        """Tell whether a tile of the unit has the slice."""
        return tile.start <= self.slice.start and self.slice.stop <= tile.stop

    def inside(self, tensor: Tensor) -> Tensor:
        """Return the part's elements of a tensor over its slice."""
        start = self.low - self.unit.start - self.slice.start
        return tensor[start : start + self.high - self.low]

    def entries(self, state: State) -> dict[str, Any]:
        """Return the slice's other state entries, which may be set."""
        part = self.slice
        return part.scalars if part.leaf is None else state.setdefault(part.leaf, {})

    def count_step(self, state: State) -> float:
        """Add 1 to the part's step count; return it."""
        own = self.entries(state)
        own["step"] = own["step"] + 1.0 if "step" in own else torch.tensor(1.0)
        return float(own["step"])


TileWork = tuple[ShardStore, Range, Sequence[ParameterPart]]
"""Holds a tile of a store and its parts."""


def parts_of(slices: Sequence[ShardSlice]) -> list[ParameterPart]:
    """List the parts of slices that have one parameter each."""
    found = []
    for part in slices:
        first = part.unit.start
        inside = part.unit.layout.overlaps(first + part.start, first + part.stop)
        found += [ParameterPart(part, index, low, high) for index, low, high in inside]
    return found


def work_on(parts: Sequence[ParameterPart]) -> list[TileWork]:
    """List the tiles that have parts with a gradient, in the order of the units."""
    by_unit: dict[int, list[ParameterPart]] = {}
    for part in parts:
        store = part.unit.store
        if part.slice.used and store is not None and store.has_grad:
            by_unit.setdefault(id(part.unit), []).append(part)
    work: list[TileWork] = []
    for own in by_unit.values():
        store = own[0].unit.store
        assert store is not None
        for start, stop in store.tiles:
            inside = [p for p in own if start <= p.slice.start and p.slice.stop <= stop]
            if inside:
                work.append((store, (start, stop), inside))
    return work


def each_tile(work: Sequence[TileWork]) -> Iterator[tuple[Sequence[ParameterPart], OpenTile, TileView]]:
    """Yield the parts of each tile with the tile, open for a step. Raises DiskError."""
    with open_tiles(work, Access.STEP) as tiles:
        yield from tiles


def by_group(parts: Sequence[ParameterPart]) -> Mapping[int, list[ParameterPart]]:
    """Return parts by their group's index."""
    found: dict[int, list[ParameterPart]] = {}
    for part in parts:
        found.setdefault(part.group, []).append(part)
    return found


_CACHED = 1 << 16
"""Elements whose temporaries stay in the cache of a core."""


def cache_sized(parts: Sequence[ParameterPart], device: torch.device) -> Iterator[Sequence[ParameterPart]]:
    """Yield the same elements in lists of parts that one element after the other is computed from: few at a
    time on the CPU, where each operation would read and write memory otherwise, and all of them elsewhere.
    """
    if device.type != "cpu":
        yield parts
        return
    found: list[ParameterPart] = []
    room = _CACHED
    for part in parts:
        low = part.low
        while low < part.high:
            high = min(part.high, low + room)
            found.append(replace(part, low=low, high=high))
            room -= high - low
            low = high
            if not room:
                yield found
                found = []
                room = _CACHED
    if found:
        yield found


def gradients(parts: Sequence[ParameterPart], tile: TileView, divisor: float) -> list[Tensor]:
    """Return the gradients of parts in the master's dtype, averaged and unscaled, as new tensors."""
    assert tile.grad is not None
    found = [part.of(tile, tile.grad).to(tile.master.dtype, copy=True) for part in parts]
    torch._foreach_mul_(found, 1.0 / divisor)
    return found


# -- step -------------------------------------------------------------------------------------------


class CollectiveStep(StepMethod, ABC):
    """Steps all units, on the device and off it, before it returns; each of its slices belongs to one
    parameter.
    """

    steps_on_device = False
    by_parameter = True

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        """Prepare to step ``units``, which may be replaced."""
        self.units = units
        self.comm = comm
        self._error: BaseException | None = None
        self._uploads: list[Pending] = []
        self._after: torch.cuda.Event | None = None

    @staticmethod
    def state_count(optimizer: torch.optim.Optimizer) -> int:
        """Count the tensors that the optimizer keeps for each element, at most."""
        return 2

    @staticmethod
    def group_states(group: Mapping[str, Any]) -> float:
        """Count the tensors that it keeps for each element of a param group, in the mean."""
        return 2

    def takes(self, unit: Unit) -> bool:
        """Tell whether this object steps a unit: it does."""
        return True

    def prepare(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Raise what keeps the step from being begun: nothing has changed then, and others may follow.

        All ranks raise or none does: one that raised alone would leave the others waiting in the step. So
        this looks at what all ranks know (groups, units, ``used``), and at its own part only to agree on it.
        """

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Do the step. Raises DiskError. Collective."""
        # Outside of the try: what it raises has changed nothing, and another step may follow.
        self.prepare(rule, slices, used)
        # The device may still run passes that read the old values: no upload starts before their end.
        self._after = stream_mark(self.comm.device)
        try:
            with torch.no_grad():
                self.run(rule, parts_of(slices), rule.optimizer.state)
            self.await_uploads()
        except BaseException as error:
            # The error stays: after an incomplete step, each further call raises it.
            self._error = error
            raise
        finally:
            self._uploads.clear()

    @abstractmethod
    def run(self, rule: UpdateRule, parts: Sequence[ParameterPart], state: State) -> None:
        """Update all parts with a gradient by the groups of ``rule.optimizer``, and publish their tiles."""

    def publish(self, tile: OpenTile, view: TileView) -> None:
        """Send a tile's new values to where gathers read."""
        if view.out is not None:
            # No kernel of these optimizers writes the copy in the compute dtype.
            view.out.copy_(view.master)
        self._uploads.append(tile.publish(self._after))

    def await_uploads(self) -> None:
        """Let later work on the device wait for what was published."""
        for upload in self._uploads:
            upload.wait()
        self._uploads.clear()

    def check(self) -> None:
        """Raise what ended a step half-way."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Raise what ended a step half-way."""
        self.check()


# -- matrices ---------------------------------------------------------------------------------------
#
# Brings the parts of matrices together on the ranks that compute on them, and the results back.


BATCH_NUMEL = 64 << 20
"""Limits the elements of the units whose matrices travel at once: 128 MB in bf16."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Describes a parameter that one rank computes on."""

    unit: Unit
    index: int
    group: int
    owner: int
    """The rank that computes: one of those that have a part of it, so that each of them knows its turn."""
    holders: Mapping[Range, tuple[int, ...]]
    """Maps ranges of the unit's flat buffer to the ranks that keep them."""

    def source(self, extent: Range) -> int:
        """Return the rank whose values of a range count; the owner itself where it has them."""
        ranks = self.holders[extent]
        return self.owner if self.owner in ranks else ranks[self.owner % len(ranks)]


class MatrixExchange:
    """Knows which rank has which part of each matrix, and moves the parts of those that are stepped."""

    def __init__(self, comm: Comm, units: Sequence[Unit], groups: set[int]) -> None:
        """Deal the matrices of these param groups out to the ranks. Collective."""
        self._comm = comm
        self._units = list(units)
        self._groups = groups
        everyone = comm.exchange(
            [(unit.start, unit.stop) for unit in units], "exchanges which shards it holds"
        )
        load = [0.0] * comm.world_size
        self._matrices: dict[int, list[Matrix]] = {}
        for number, unit in enumerate(units):
            ranges = [kept[number] for kept in everyone]
            self._matrices[id(unit)] = _deal(unit, ranges, groups, load)
        self.batches: list[list[Unit]] = []
        """Lists the units that are stepped together."""
        room = 0
        for unit in units:
            if not self.batches or room < unit.numel:
                self.batches.append([])
                room = BATCH_NUMEL
            self.batches[-1].append(unit)
            room -= unit.numel

    def serves(self, units: Sequence[Unit], groups: set[int]) -> bool:
        """Tell whether these are the units and the groups that it was made for."""
        same = len(units) == len(self._units) and all(map(operator.is_, units, self._units))
        return same and groups == self._groups

    def run(
        self, parts: Mapping[ParameterPart, Tensor], solve: Callable[[Matrix, Tensor], Tensor]
    ) -> dict[ParameterPart, Tensor]:
        """Return, for each part of matrices of a batch, its elements of what ``solve`` makes of the whole
        matrix (rows x columns, bf16, on the device). All ranks that have parts of a matrix must give theirs.
        Collective.
        """
        rank = self._comm.rank
        size = self._comm.world_size
        mine: dict[tuple[int, int], list[tuple[ParameterPart, Tensor]]] = defaultdict(list)
        for part, value in parts.items():
            mine[id(part.unit), part.index].append((part, value))
        # In one order on all ranks, so that what they send needs no description.
        known = (matrix for unit in self._units for matrix in self._matrices[id(unit)])
        matrices = [matrix for matrix in known if (id(matrix.unit), matrix.index) in mine]
        flat = {matrix: _joined(mine[id(matrix.unit), matrix.index]) for matrix in matrices}
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming: list[list[tuple[Matrix, Range]]] = [[] for _ in range(size)]
        for matrix in matrices:
            for extent in matrix.holders:
                source = matrix.source(extent)
                # One rank sends each range, also where several ranks keep it (stage 0, or copies of groups).
                if source == rank:
                    outgoing[matrix.owner].append(flat[matrix][extent])
                if matrix.owner == rank:
                    incoming[source].append((matrix, extent))
        whole: dict[Matrix, Tensor] = {}
        for source, values in enumerate(self._send(outgoing, incoming)):
            for (matrix, extent), value in zip(incoming[source], values, strict=True):
                slot = matrix.unit.layout.slots[matrix.index]
                if matrix not in whole:
                    whole[matrix] = torch.empty(slot.numel, dtype=torch.bfloat16, device=self._comm.device)
                whole[matrix][extent[0] - slot.offset : extent[1] - slot.offset] = value
        outgoing = [[] for _ in range(size)]
        incoming = [[] for _ in range(size)]
        for matrix in matrices:
            if matrix.owner == rank:
                rows = matrix.unit.shapes[matrix.index][0]
                whole[matrix] = solve(matrix, whole[matrix].view(rows, -1)).reshape(-1)
            for extent, ranks in matrix.holders.items():
                offset = matrix.unit.layout.slots[matrix.index].offset
                if matrix.owner == rank:
                    for holder in ranks:
                        outgoing[holder].append(whole[matrix][extent[0] - offset : extent[1] - offset])
                if rank in ranks:
                    incoming[matrix.owner].append((matrix, extent))
        found: dict[tuple[int, int], dict[Range, Tensor]] = defaultdict(dict)
        for owner, values in enumerate(self._send(outgoing, incoming)):
            for (matrix, extent), value in zip(incoming[owner], values, strict=True):
                found[id(matrix.unit), matrix.index][extent] = value
        return {part: _piece_of(part, found[id(part.unit), part.index]) for part in parts}

    def _send(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[tuple[Matrix, Range]]]
    ) -> list[list[Tensor]]:
        """Send values to each rank; return what the ranks have sent, cut into ranges."""
        # The receiver knows how much comes from each rank, because it lists the same matrices.
        numels = [[extent[1] - extent[0] for _, extent in each] for each in incoming]
        empty = torch.empty(0, dtype=torch.bfloat16, device=self._comm.device)
        sent = torch.cat([value.reshape(-1) for values in outgoing for value in values] or [empty])
        got = sent
        if self._comm.world_size > 1:
            got = torch.empty(sum(map(sum, numels)), dtype=sent.dtype, device=sent.device)
            self._comm._count("matrices", sent.numel())

            def start() -> Work:
                work = dist.all_to_all_single(
                    got.view(torch.uint8),  # gloo knows no bf16
                    sent.view(torch.uint8),
                    [2 * sum(each) for each in numels],
                    [2 * sum(value.numel() for value in values) for values in outgoing],
                    group=self._comm.data.reduce_group,
                    async_op=True,
                )
                key = waits.next_key(self._comm.number, "matrices")
                return Work(work, key, "exchanges shards of Muon's matrices", got, sent)

            self._comm.observe("all_to_all", sent.nbytes, start).wait()
        parts = iter(got.split([numel for each in numels for numel in each]))  # type: ignore[no-untyped-call]  # torch does not type it
        return [[next(parts) for _ in each] for each in numels]


def _deal(unit: Unit, ranges: Sequence[Range], groups: set[int], load: list[float]) -> list[Matrix]:
    """Choose the owners of a unit's matrices: of the ranks that have a part the one with the least work."""
    by_range: dict[Range, list[int]] = defaultdict(list)
    for rank, extent in enumerate(ranges):
        by_range[extent].append(rank)
    found = []
    for index, (slot, shape) in enumerate(zip(unit.layout.slots, unit.shapes, strict=True)):
        if slot.group not in groups or len(shape) < 2 or not slot.numel:
            continue
        holders = {
            (max(low, slot.offset), min(high, slot.stop)): tuple(ranks)
            for (low, high), ranks in sorted(by_range.items())
            if low < slot.stop and high > slot.offset
        }
        # All ranks compute the same owners from the same ranges: no message is needed to agree on them.
        owner = min(sorted({rank for ranks in holders.values() for rank in ranks}), key=load.__getitem__)
        # In proportion to the products of the iteration: rows x rows x columns with rows the smaller side.
        load[owner] += float(slot.numel) * min(shape[0], slot.numel // shape[0])
        found.append(Matrix(unit, index, slot.group, owner, holders))
    return found


def _joined(parts: Sequence[tuple[ParameterPart, Tensor]]) -> dict[Range, Tensor]:
    """Return this rank's range of a matrix as one tensor; tiles may have cut it."""
    own = sorted(parts, key=lambda each: each[0].low)
    extent = own[0][0].low, own[-1][0].high
    return {extent: torch.cat([value.reshape(-1) for _, value in own])}


def _piece_of(part: ParameterPart, found: Mapping[Range, Tensor]) -> Tensor:
    for (low, high), value in found.items():
        if low <= part.low and part.high <= high:
            return value[part.low - low : part.high - low]
    raise AssertionError(f"no range holds elements {part.low} to {part.high} of {part.unit.name}")
