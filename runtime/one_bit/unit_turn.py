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
        first, betas = [each["exp_avg"] for each in states], self.groups[parts[0].group]["betas"]
        if self.averaged is not None:
            at = self.unit.start
            found = [self.averaged[part.low - at : part.high - at] for part in parts]
            if self.frozen:
                torch._foreach_copy_(first, found)
            else:
                torch._foreach_lerp_(first, found, 1 - float(betas[0]))
            # what never had a gradient has no variance to divide by, and the sign of nothing is no direction
            torch._foreach_mul_(first, torch._foreach_sign([each["exp_avg_sq"] for each in states]))
            return
        grads = gradients(parts, view, self.divisor)
        if self.frozen:
            torch._foreach_lerp_(first, grads, 1 - float(betas[0]))
        else:
            update_moments(first, [each["exp_avg_sq"] for each in states], grads, betas)
