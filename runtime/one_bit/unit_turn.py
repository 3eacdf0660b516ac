"""Describes the step of one unit by a 1-bit optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collective_step.lamb import update_moments
from ..collective_step.parts import ParameterPart, TileWork, gradients
from ..optim.update_rule import State
from ..zero.store import TileView
from ..zero.unit import Unit


@dataclass(frozen=True, slots=True)
class UnitTurn:
    """Describes the step of one unit."""

    unit: Unit
    parts: Sequence[ParameterPart]
    """Lists this rank's parts of it, those without a gradient, too."""
    work: Sequence[TileWork]
    """Lists the tiles of those with one."""
    groups: Sequence[dict[str, Any]]
    divisor: float
    state: State
    frozen: bool
    """Tells that the variance stays as it is."""
    averaged: Tensor | None = None
    """Holds what signs have brought for this rank's shard, where the shard is: the gradient, or if ``frozen``
    the new momentum. None: the tiles have the averaged gradient.
    """

    def bring_moments(
        self, parts: Sequence[ParameterPart], view: TileView, states: Sequence[dict[str, Tensor]]
    ) -> None:
        """Bring the moments of one group's parts in a tile up to date."""
        first, second = ([each[name] for each in states] for name in ("exp_avg", "exp_avg_sq"))
        betas = self.groups[parts[0].group]["betas"]
        if self.averaged is None:
            found = gradients(parts, view, self.divisor)
        else:
            at = self.unit.start
            found = [self.averaged[part.low - at : part.high - at] for part in parts]
        if self.averaged is None and not self.frozen:
            update_moments(first, second, found, betas)
            return
        if self.averaged is not None and self.frozen:
            torch._foreach_copy_(first, found)
        else:
            torch._foreach_lerp_(first, found, 1 - float(betas[0]))
        clear_without_variance(first, second)


def clear_without_variance(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Set elements of ``first`` to 0 where the variance is 0: what never had a gradient has nothing to divide
    by, and the sign of nothing is no direction. Every step that leaves the variance as it is needs this.
    """
    torch._foreach_mul_(list(first), torch._foreach_sign(list(second)))
