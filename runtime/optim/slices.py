"""Cuts the shards of units into the slices that an optimizer sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from ...cuda_ops.narrow_state import narrow_as, widen_all
from ..errors import OptimizerError
from ..zero.policy import is_shardable
from ..zero.store import TileView
from ..zero.unit import Unit
from .update_rule import State, is_elementwise

# -- slices -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ShardSlice:
    """Describes elements ``start`` to ``stop`` of a unit's shard, all of one optimizer group.

    The leaf is flat, or, for an optimizer that needs whole tensors, one parameter in its shape (a scalar in
    the shape (1,)).
    """

    unit: Unit
    start: int
    stop: int
    group: int
    leaf: Tensor | None
    """Views the master values, as the optimizer's parameter; None where those are on disk."""
    used: bool = True
    """Tells whether some rank had a gradient for it in this step."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """On disk: keeps the state entries that are not tensors of its size."""
    on_disk: list[str] = field(default_factory=list)
    """On disk: names its state tensors there, in their order."""

    @property
    def place(self) -> tuple[int, int]:
        """Tell its elements apart from others, in any layout of the ranks: the unit's first name in numbers,
        and the slice's first element in the unit.
        """
        return crc32(self.unit.names[0].encode()), self.unit.start + self.start

    def of(self, shard: Tensor) -> Tensor:
        """Return the slice's part of a flat tensor over the shard, in the leaf's shape."""
        assert self.leaf is not None
        return (
            shard if shard.shape == self.leaf.shape else shard[self.start : self.stop].view(self.leaf.shape)
        )

    def span(self, tile: TileView) -> slice:
        """Return where the slice is in a tile that holds it."""
        return slice(self.start - tile.start, self.stop - tile.start)

    def tensors_in(self, tile: TileView, state: State) -> dict[str, Tensor]:
        """Find the optimizer's state of each element, by name: in the open tile or in ``state``. State of
        fewer than 32 bits is in new fp32 tensors.
        """
        if self.leaf is None:
            return {
                name: region[self.span(tile)] for name, region in zip(self.on_disk, tile.state, strict=False)
            }
        own = widen_all(state.get(self.leaf, {}))
        return {name: value for name, value in own.items() if is_elementwise(value, self.leaf)}

    def entries(self, state: State) -> dict[str, Any]:
        """Return the optimizer's state entries; on disk, those that are not tensors of its size."""
        return self.scalars if self.leaf is None else state.get(self.leaf, {})


def make_slices(units: Sequence[Unit], whole: bool) -> list[ShardSlice]:
    """Make a slice of each piece, or with ``whole`` of each parameter; off the device, pieces are cut at the
    borders of tiles.
    """
    slices = []
    for unit in units:
        if whole:
            slices += _whole_slices(unit)
            continue
        store = unit.store
        assert store is not None
        for piece in unit.pieces:
            ranges = [(piece.start, piece.stop)]
            if not store.on_device:
                # Off the device, a tile is in memory at a time: a slice must not reach into two of them.
                ranges = [cut for cut in store.cuts if piece.start <= cut[0] and cut[1] <= piece.stop]
            for start, stop in ranges:
                leaf = None
                if store.master is not None:
                    # A view of the masters, so that the optimizer updates them in place.
                    leaf = store.master[start:stop].detach().requires_grad_()
                slices.append(ShardSlice(unit, start, stop, piece.group, leaf))
    return slices


def _whole_slices(unit: Unit) -> list[ShardSlice]:
    assert unit.store is not None and unit.stop - unit.start == unit.numel
    master = unit.store.master
    assert master is not None
    slices = []
    for slot, shape in zip(unit.layout.slots, unit.shapes, strict=True):
        if slot.group >= 0:
            leaf = master[slot.offset : slot.stop].view(shape or (1,)).detach().requires_grad_()
            slices.append(ShardSlice(unit, slot.offset, slot.stop, slot.group, leaf))
    return slices


def separate_unused(
    slices: list[ShardSlice], units: Sequence[Unit], used: list[bool], optimizer: torch.optim.Optimizer
) -> list[ShardSlice]:
    """Mark the slices whose parameters had no gradient on any rank; torch does not update such parameters.

    ``used`` has a flag for each parameter of each unit, in order. A slice that holds both kinds is split for
    good, its state with it: each part counts its steps. Returns all slices, in order.
    """
    if all(used):
        for part in slices:
            part.used = True
        return slices
    # torch skips a parameter without a gradient: no decay, no momentum, no count of steps. A slice that is
    # stepped as one tensor cannot skip a part of itself.
    flags = iter(used)
    unused = {(id(unit), i) for unit in units for i in range(len(unit.parameters)) if not next(flags)}
    split = split_slices(slices, lambda unit, index: (id(unit), index) not in unused, optimizer)
    for part, is_used in split:
        part.used = is_used
    return [part for part, _ in split]


Label = TypeVar("Label")


def split_slices(
    slices: list[ShardSlice], label: Callable[[Unit, int], Label], optimizer: torch.optim.Optimizer
) -> list[tuple[ShardSlice, Label]]:
    """Split for good, state included, every slice whose parameters have different labels. Returns all slices
    in order, with the label of each. ``label`` is asked for the parameters of a unit by index.
    """
    result: list[tuple[ShardSlice, Label]] = []
    for part in slices:
        ranges = _parts(part, label)
        made = [part] if len(ranges) == 1 else _split(part, [found[:2] for found in ranges], optimizer)
        result += [(new, found[2]) for new, found in zip(made, ranges, strict=True)]
    return result


def _parts(part: ShardSlice, label: Callable[[Unit, int], Label]) -> list[tuple[int, int, Label]]:
    """Return ``(start, stop, label)`` of the parts of a slice, in shard coordinates and without gaps."""
    first = part.unit.start
    ranges: list[tuple[int, int, Label]] = []
    for index, low, _ in part.unit.layout.overlaps(first + part.start, first + part.stop):
        own = label(part.unit, index)
        # The first range begins where the slice does, and each ends where the next label begins: gaps belong
        # to the range before them.
        if not ranges:
            ranges.append((part.start, part.stop, own))
        elif ranges[-1][2] != own:
            start, _, before = ranges[-1]
            ranges[-1] = (start, low - first, before)
            ranges.append((low - first, part.stop, own))
    return ranges


def _check_divisible(name: str, state: Mapping[str, Any], leaf: Tensor) -> None:
    """Raise OptimizerError for state that a part of a slice cannot have."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1 and not is_elementwise(value, leaf):
            raise OptimizerError(
                f"optimizer {name} keeps {key!r}, a tensor of shape {list(value.shape)} for {leaf.numel()} "
                "elements of a shard, of which some had no gradient in this step: such state cannot be "
                "divided. Use every parameter in each step, or another optimizer"
            )


def _split(
    part: ShardSlice, ranges: list[tuple[int, int]], optimizer: torch.optim.Optimizer
) -> list[ShardSlice]:
    # Popped: the old leaf is no parameter any more, and its state would stay in memory.
    own = part.scalars if part.leaf is None else optimizer.state.pop(part.leaf, {})
    wide = widen_all(own)
    if part.leaf is not None:
        _check_divisible(type(optimizer).__name__, wide, part.leaf)
    made = []
    for start, stop in ranges:
        inside = slice(start - part.start, stop - part.start)
        leaf = None if part.leaf is None else part.leaf[inside].detach().requires_grad_()
        # Narrow state is cut as fp32, because a block with one scale may lie in two parts. Tensors such as
        # the step count are cloned: each part counts its own steps from here on.
        entries = {
            key: value[inside]
            if part.leaf is not None and is_elementwise(value, part.leaf)
            else (value.clone() if isinstance(value, Tensor) else value)
            for key, value in wide.items()
        }
        narrow_as(own, entries)
        if leaf is not None and own:
            optimizer.state[leaf] = entries
        scalars = entries if leaf is None else {}
        made.append(
            ShardSlice(part.unit, start, stop, part.group, leaf, part.used, scalars, list(part.on_disk))
        )
    for group in optimizer.param_groups:
        # Insert at the old leaf's position, so that a group's parameters stay in the shard's order.
        position = next((i for i, leaf in enumerate(group["params"]) if leaf is part.leaf), None)
        if position is not None:
            group["params"][position : position + 1] = [each.leaf for each in made]
    return made


def make_narrow(optimizer: torch.optim.Optimizer, part: ShardSlice) -> None:
    """Let an 8-bit optimizer of bitsandbytes make the state of a slice that has none yet: it alone knows how
    large a tensor has to be for 8 bits.
    """
    make = getattr(optimizer, "init_state", None)
    if part.leaf is None or optimizer.state.get(part.leaf) or make is None:
        return
    if any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__):
        group = optimizer.param_groups[part.group]
        position = next(i for i, leaf in enumerate(group["params"]) if leaf is part.leaf)
        make(group, part.leaf, part.group, position)


# -- param groups -----------------------------------------------------------------------------------
#
# Builds the groups of parameters that an optimizer is made for.


def groups_by_parameter(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Map the id of each parameter to its group's index."""
    return {id(p): index for index, group in enumerate(groups) for p in group["params"]}


def parameter_groups(parameters: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Build optimizer groups of ``parameters``: None, or an iterable of parameters, of (name, parameter)
    pairs, whose names are dropped, or of dicts with "params".

    Frozen parameters are among them: they are trained once they require a gradient. Raises ValueError if one
    is not a parameter of ``model`` or is listed twice, TypeError for entries of two kinds.
    """
    listed: list[Any] = list(model.parameters()) if parameters is None else list(parameters)
    for index, entry in enumerate(listed):
        if isinstance(entry, dict) is not isinstance(listed[0], dict):
            is_group = "is" if isinstance(entry, dict) else "is not"
            raise TypeError(
                f"model_parameters: entry {index} {is_group} a param group, unlike entry 0: pass only "
                "parameters, or only param groups"
            )
        if isinstance(entry, dict) and "params" not in entry:
            raise TypeError(
                f'model_parameters: entry {index} is a dict without "params": a param group is '
                '{"params": [...], "lr": ...}'
            )
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    known = {id(p) for p in model.parameters()}
    seen: set[int] = set()
    result = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        members = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in members]
        for parameter in members:
            if id(parameter) not in known:
                raise ValueError("model_parameters contains a tensor that is not a parameter of the model")
            if id(parameter) in seen:
                raise ValueError("model_parameters contains a parameter twice")
            seen.add(id(parameter))
        result.append({**group, "params": [p for p in members if is_shardable(p)]})
    return result
