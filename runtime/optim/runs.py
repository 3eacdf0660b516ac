"""The pieces of the units' shards that an optimizer sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..offload.place import Place
from ..zero.unit import Unit
from .rule import is_elementwise


@dataclass(slots=True, eq=False)
class Run:
    """Elements ``start`` to ``stop`` of a unit's shard, all of one optimizer group."""

    unit: Unit
    start: int
    stop: int
    group: int
    leaf: Tensor | None
    """The optimizer's parameter, over the master values; None where those are on disk."""
    used: bool = True
    """Some rank had a gradient for it in this step."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Of a run on disk: the state entries that are not tensors of its size."""


def make_runs(units: Sequence[Unit]) -> list[Run]:
    """One for each piece; off the device pieces are cut at the borders of tiles."""
    runs = []
    for unit in units:
        for piece in unit.pieces:
            if unit.state_place is Place.DEVICE:
                ranges = [(piece.start, piece.stop)]
            else:
                ranges = [cut for cut in unit.cuts if piece.start <= cut[0] and cut[1] <= piece.stop]
            for start, stop in ranges:
                leaf = None
                if unit.master is not None:
                    leaf = unit.master[start:stop].detach().requires_grad_()
                runs.append(Run(unit, start, stop, piece.group, leaf))
    return runs


def separate_unused(
    runs: list[Run], units: Sequence[Unit], used: list[bool], optimizer: torch.optim.Optimizer
) -> list[Run]:
    """Mark the runs whose parameters had no gradient on any rank; torch leaves such parameters alone.

    ``used`` has a flag for each parameter of each unit, in order. A run that holds both kinds is split for
    good, its state with it: each part counts its own steps. Returns all runs, in order.
    """
    if all(used):
        for run in runs:
            run.used = True
        return runs
    flags = iter(used)
    unused = {(id(unit), i) for unit in units for i in range(len(unit.parameters)) if not next(flags)}
    result: list[Run] = []
    for run in runs:
        parts = _parts(run, unused)
        if len(parts) <= 1:
            run.used = parts[0][2] if parts else False
            result.append(run)
        else:
            result += _split(run, parts, optimizer)
    return result


def _parts(run: Run, unused: set[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """``(start, stop, used)`` of the parts of a run, in shard coordinates, without gaps between them."""
    first = run.unit.start
    parts: list[tuple[int, int, bool]] = []
    for index, low, _ in run.unit.layout.overlaps(first + run.start, first + run.stop):
        used = (id(run.unit), index) not in unused
        if not parts:
            parts.append((run.start, run.stop, used))
        elif parts[-1][2] != used:
            start, _, before = parts[-1]
            parts[-1] = (start, low - first, before)
            parts.append((low - first, run.stop, used))
    return parts


def _split(run: Run, parts: list[tuple[int, int, bool]], optimizer: torch.optim.Optimizer) -> list[Run]:
    if run.leaf is None:
        copies = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in run.scalars.items()} for _ in parts
        ]
        return [
            Run(run.unit, start, stop, run.group, None, used, scalars)
            for (start, stop, used), scalars in zip(parts, copies, strict=True)
        ]
    state = optimizer.state.pop(run.leaf, {})
    made = []
    for start, stop, used in parts:
        low, high = start - run.start, stop - run.start
        leaf = run.leaf.detach()[low:high].requires_grad_()
        made.append(Run(run.unit, start, stop, run.group, leaf, used))
        if state:
            optimizer.state[leaf] = {
                key: value[low:high]
                if is_elementwise(value, run.leaf)
                else (value.clone() if isinstance(value, Tensor) else value)
                for key, value in state.items()
            }
    for group in optimizer.param_groups:
        position = next((i for i, leaf in enumerate(group["params"]) if leaf is run.leaf), None)
        if position is not None:
            group["params"][position : position + 1] = [part.leaf for part in made]
    return made


def _copied(scalars: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}
