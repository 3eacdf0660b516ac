"""The pieces of the units' shards that an optimizer sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..offload.manager import Place
from ..zero.unit import Unit
from .update_rule import is_elementwise

KEYS = "\0elementwise"
"""Among the scalars of a run on disk: the names of its state tensors there, in the order of the regions."""


@dataclass(slots=True, eq=False)
class Run:
    """Elements ``start`` to ``stop`` of a unit's shard, all of one optimizer group.

    The leaf is flat, or, for an optimizer that needs whole tensors, one parameter in its shape (a scalar in
    the shape (1,)).
    """

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


def make_runs(units: Sequence[Unit], whole: bool) -> list[Run]:
    """One for each piece, or with ``whole`` for each parameter; off the device pieces are cut at the borders
    of tiles.
    """
    runs = []
    for unit in units:
        if whole:
            runs += _whole_runs(unit)
            continue
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


def _whole_runs(unit: Unit) -> list[Run]:
    assert unit.master is not None and unit.stop - unit.start == unit.numel
    runs = []
    for slot, shape in zip(unit.layout.slots, unit.shapes, strict=True):
        if slot.group >= 0:
            leaf = unit.master[slot.offset : slot.stop].view(shape or (1,)).detach().requires_grad_()
            runs.append(Run(unit, slot.offset, slot.stop, slot.group, leaf))
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
    split = split_runs(runs, lambda unit, index: (id(unit), index) not in unused, optimizer)
    for run, is_used in split:
        run.used = is_used
    return [run for run, _ in split]


Label = TypeVar("Label")


def split_runs(
    runs: list[Run], label: Callable[[Unit, int], Label], optimizer: torch.optim.Optimizer
) -> list[tuple[Run, Label]]:
    """Split for good, state included, every run whose parameters have different labels; all runs in order,
    with the label of each. ``label`` is asked for the parameters of a unit by index.
    """
    result: list[tuple[Run, Label]] = []
    for run in runs:
        parts = _parts(run, label)
        made = [run] if len(parts) == 1 else _split(run, [part[:2] for part in parts], optimizer)
        result += [(new, part[2]) for new, part in zip(made, parts, strict=True)]
    return result


def _parts(run: Run, label: Callable[[Unit, int], Label]) -> list[tuple[int, int, Label]]:
    """``(start, stop, label)`` of the parts of a run, in shard coordinates, without gaps between them."""
    first = run.unit.start
    parts: list[tuple[int, int, Label]] = []
    for index, low, _ in run.unit.layout.overlaps(first + run.start, first + run.stop):
        own = label(run.unit, index)
        if not parts:
            parts.append((run.start, run.stop, own))
        elif parts[-1][2] != own:
            start, _, before = parts[-1]
            parts[-1] = (start, low - first, before)
            parts.append((low - first, run.stop, own))
    return parts


def _split(run: Run, parts: list[tuple[int, int]], optimizer: torch.optim.Optimizer) -> list[Run]:
    if run.leaf is None:
        copies = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in run.scalars.items()} for _ in parts
        ]
        return [
            Run(run.unit, start, stop, run.group, None, run.used, scalars)
            for (start, stop), scalars in zip(parts, copies, strict=True)
        ]
    state = optimizer.state.pop(run.leaf, {})
    made = []
    for start, stop in parts:
        low, high = start - run.start, stop - run.start
        leaf = run.leaf.detach()[low:high].requires_grad_()
        made.append(Run(run.unit, start, stop, run.group, leaf, run.used))
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
