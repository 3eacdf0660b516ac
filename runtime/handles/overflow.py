"""Names the parameters whose gradients overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..zero.store import DeviceStore
from ..zero.unit import Unit


def nonfinite_names(units: Sequence[Unit]) -> list[str]:
    """Return the names of parameters with inf or NaN in this rank's shard of the gradients."""
    names: list[str] = []
    for unit in units:
        store = unit.store
        if store is None or not store.has_grad:
            continue
        if isinstance(store, DeviceStore):
            for index, first, last in unit.layout.overlaps(unit.start, unit.stop):
                if not bool(torch.isfinite(store.grad()[first - unit.start : last - unit.start]).all()):
                    names.append(unit.names[index])
            continue
        # names are as precise as the squares, which are known per cut
        for (low, high), square in zip(store.cuts, store.grad_squares(), strict=False):
            if not square.isfinite():
                slots = unit.layout.overlaps(unit.start + low, unit.start + high)
                names += [unit.names[index] for index, _, _ in slots]
    return names
