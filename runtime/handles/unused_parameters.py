"""Refuses a step in which a parameter has no gradient, for ``ignore_unused_parameters: false``."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.collectives import Comm
from ..errors import ParameterError
from ..zero.reduce import GradientReducer
from ..zero.unit import Unit

_SHOWN = 10


def refuse_unused(units: Sequence[Unit], reducer: GradientReducer, comm: Comm) -> None:
    """Check that every parameter of the optimizer has a gradient of this step on every rank.

    Collective. Raises ParameterError on every rank, with the names of those that have none.
    """
    mine = [
        name
        for unit in units
        for index, (name, slot) in enumerate(zip(unit.names, unit.layout.slots, strict=True))
        if slot.group >= 0 and not reducer.has(unit, index)
    ]
    missing: dict[str, list[int]] = {}
    for rank, names in enumerate(comm.exchange(mine)):
        for name in names:
            missing.setdefault(name, []).append(rank)
    if not missing:
        return
    shown = [
        name if len(ranks) == comm.world_size else f"{name} (on rank {', '.join(map(str, ranks))})"
        for name, ranks in list(missing.items())[:_SHOWN]
    ]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise ParameterError(
        f"no gradient in this step for {', '.join(shown)}{more}: use them in the loss, freeze them "
        "(requires_grad_(False)), or set zero_optimization.ignore_unused_parameters to true"
    )
