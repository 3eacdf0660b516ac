"""Moves state that an optimizer makes when it is constructed (Adagrad) to the shards, which come later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cut import whole_shape
from ..zero.store import Access, open_tiles
from .slices import ShardSlice

Known = dict[str, Tensor | float]
"""Maps a state entry's name to its tensor, or to the one value of each of its parameter's elements."""
Entries = dict[str, Tensor | float | None]
"""Maps it to None where no parameter of the group has an element on this rank that would show the value."""


def take_initial_state(optimizer: torch.optim.Optimizer) -> list[Entries]:
    """Return the entries that each group's parameters begin with; clear the optimizer's state.

    A parameter shows what an entry is by its shape. One without elements (another pipeline stage's, an empty
    placeholder) shows no value, and one without dimensions does not tell an entry for each element from one
    for the whole parameter: others go first.

    Raises ValueError if the optimizer has already made steps, or begins with values that are not all alike.
    """
    groups: list[Entries] = []
    for group in optimizer.param_groups:
        entries: Entries = {}
        for parameter in sorted(group["params"], key=_shows_little):
            # an optimizer that was made before a parameter was cut has a tensor of the whole
            shapes = {tuple(parameter.shape), whole_shape(parameter, parameter.shape)}
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or (key == "step" and value.any()):
                    raise _used(optimizer)
                if key == "step" or tuple(value.shape) not in shapes:
                    entries.setdefault(key, value)
                elif not value.numel():
                    entries.setdefault(key, None)
                else:
                    alike = float(value.reshape(-1)[0])
                    if not bool((value == alike).all()):
                        raise _used(optimizer)
                    entries.setdefault(key, alike)
        groups.append(entries)
    optimizer.state.clear()
    return groups


def _shows_little(parameter: Tensor) -> int:
    return 2 if not parameter.numel() else int(parameter.dim() == 0)


def _used(optimizer: torch.optim.Optimizer) -> ValueError:
    return ValueError(
        f"optimizer {type(optimizer).__name__} already has state: pass a new one to zlaunch.initialize. "
        "To import the state, save it with torch.distributed.checkpoint and run `zlaunch checkpoint import`"
    )


def give_initial_state(
    optimizer: torch.optim.Optimizer, groups: list[Entries], slices: Sequence[ShardSlice]
) -> None:
    """Copy the initial state of their parameters to the shards. Raises DiskError, ValueError for a value that
    cannot be found out.
    """
    known = {index: _completed(optimizer, index, groups[index]) for index in {part.group for part in slices}}
    for part in slices:
        entries = known[part.group]
        if not entries:
            continue
        if part.leaf is None:
            _fill_on_disk(part, entries)
            continue
        state: dict[str, Any] = {}
        for key, value in entries.items():
            copy = value.clone() if isinstance(value, Tensor) else torch.full_like(part.leaf, value)
            state[key] = copy.requires_grad_(False)
        optimizer.state[part.leaf] = state


def _completed(optimizer: torch.optim.Optimizer, index: int, entries: Entries) -> Known:
    """Find out values that no parameter has shown: as an optimizer of the class begins over one element."""
    known = {key: value for key, value in entries.items() if value is not None}
    unknown = [key for key in entries if key not in known]
    if not unknown:
        return known
    group = optimizer.param_groups[index]
    probe = torch.zeros(1)
    try:
        made = type(optimizer)([{**group, "params": [probe]}], **optimizer.defaults)
        return known | {key: float(made.state[probe][key]) for key in unknown}
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} has an unknown initial value for {', '.join(unknown)}: "
            f"no parameter of group {index} has elements on this rank, and building another optimizer of "
            f"its class failed ({type(error).__name__}: {error}). Keep all constructor arguments in its "
            "`defaults`"
        ) from error


def _fill_on_disk(part: ShardSlice, entries: Known) -> None:
    part.scalars = {key: value.clone() for key, value in entries.items() if isinstance(value, Tensor)}
    part.on_disk = sorted(entries.keys() - part.scalars.keys())
    store = part.unit.store
    assert store is not None
    if any(entries[key] for key in part.on_disk):  # a new file has zeros
        own = next(tile for tile in store.tiles if tile[0] <= part.start and part.stop <= tile[1])
        with open_tiles([(store, own, None)], Access.WRITE) as tiles:
            for _, _, view in tiles:
                for key, region in zip(part.on_disk, view.state, strict=False):
                    region[part.span(view)].fill_(float(entries[key]))
