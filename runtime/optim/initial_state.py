"""Moves state that an optimizer makes when it is constructed (Adagrad) to the shards, which come later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..zero.store import Access, open_tiles
from .slices import ShardSlice

Entries = dict[str, Tensor | float]
"""Maps a state entry's name to its tensor, or to the one value of each of its parameter's elements."""


def take_initial_state(optimizer: torch.optim.Optimizer) -> list[Entries]:
    """Return the entries that each group's parameters begin with; clear the optimizer's state.

    Raises ValueError if the optimizer has already made steps, or begins with values that are not all alike.
    """
    groups: list[Entries] = []
    for group in optimizer.param_groups:
        entries: Entries = {}
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or (key == "step" and value.any()):
                    raise _used(optimizer)
                # a parameter without dimensions does not tell them apart
                is_elementwise = value.shape == parameter.shape and value.numel() > 0 and key != "step"
                alike = float(value.reshape(-1)[0]) if is_elementwise else value
                if is_elementwise and not bool((value == alike).all()):
                    raise _used(optimizer)
                entries.setdefault(key, alike)
        groups.append(entries)
    optimizer.state.clear()
    return groups


def _used(optimizer: torch.optim.Optimizer) -> ValueError:
    return ValueError(
        f"optimizer {type(optimizer).__name__} has state from earlier steps: pass a new one to "
        "zlaunch.initialize, and load its state afterwards"
    )


def give_initial_state(
    optimizer: torch.optim.Optimizer, groups: list[Entries], slices: Sequence[ShardSlice]
) -> None:
    """Copy the initial state of their parameters to the shards. Raises DiskError."""
    for part in slices:
        entries = groups[part.group]
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


def _fill_on_disk(part: ShardSlice, entries: Entries) -> None:
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
