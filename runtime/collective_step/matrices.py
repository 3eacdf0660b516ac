"""Brings the parts of matrices together on the ranks that compute on them, and the results back."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Work
from ..comm.waits import waits
from ..zero.layout import Range
from ..zero.unit import Unit
from .parts import ParameterPart

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
        self._comm, self._units, self._groups = comm, list(units), groups
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
        rank, size = self._comm.rank, self._comm.world_size
        mine: dict[tuple[int, int], list[tuple[ParameterPart, Tensor]]] = defaultdict(list)
        for part, value in parts.items():
            mine[id(part.unit), part.index].append((part, value))
        known = (matrix for unit in self._units for matrix in self._matrices[id(unit)])
        matrices = [matrix for matrix in known if (id(matrix.unit), matrix.index) in mine]
        flat = {matrix: _joined(mine[id(matrix.unit), matrix.index]) for matrix in matrices}
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming: list[list[tuple[Matrix, Range]]] = [[] for _ in range(size)]
        for matrix in matrices:
            for extent in matrix.holders:
                source = matrix.source(extent)
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
        outgoing, incoming = [[] for _ in range(size)], [[] for _ in range(size)]
        for matrix in matrices:
            if matrix.owner == rank:
                rows = matrix.unit.shapes[matrix.index][0]
                whole[matrix] = solve(matrix, whole[matrix].view(rows, -1)).reshape(-1)
            for extent, ranks in matrix.holders.items():
                offset = matrix.unit.layout.slots[matrix.index].offset
                for holder in ranks if matrix.owner == rank else ():
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
        owner = min(sorted({rank for ranks in holders.values() for rank in ranks}), key=load.__getitem__)
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
