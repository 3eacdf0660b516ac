"""Steps 1-bit LAMB: two passes over a unit's shards, since trust ratios need whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collective_step.lamb import Norms, trust_ratio
from ..collective_step.parts import ParameterPart, by_group, each_tile
from ..optim.update_rule import State
from ..zero.store import TileView
from .step import OneBitStep, adam_directions
from .unit_turn import UnitTurn


class OneBitLambStep(OneBitStep):
    """Steps OneBitLamb.

    A parameter's state has ``coefficient``, the mean of its trust ratios in the dense steps, and, once the
    variance is frozen, ``factor``, by how much its last step was longer.
    """

    names = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    @staticmethod
    def state_count(optimizer: torch.optim.Optimizer) -> int:
        return 3

    @staticmethod
    def group_states(group: Mapping[str, Any]) -> int:
        return 3

    def step_unit(self, turn: UnitTurn) -> None:
        unit, groups, state, frozen = turn.unit, turn.groups, turn.state, turn.frozen
        norms = Norms(self.comm, [unit])
        ratios = torch.zeros(len(unit.parameters), dtype=torch.float64, device=self.comm.device)
        """Holds how far the frozen denominators are above fresh ones."""
        for inside, _, view in each_tile(turn.work):
            for index, own in by_group(inside).items():
                group = groups[index]
                states = [part.states(view, state, self.names) for part in own]
                before = [each["exp_avg"].clone() for each in states] if frozen else []
                turn.bring_moments(own, view, states)
                values = [part.of(view, view.master) for part in own]
                changes = adam_directions(values, states, group)
                if not frozen:
                    norms.add(own, values, changes)
                    continue
                for part, each, old in zip(own, states, before, strict=True):
                    _refresh(each, old, group, is_first="factor" not in part.entries(state))
                    found = _largest_ratio(each, float(group["eps"])).to(ratios)
                    ratios[part.index] = torch.maximum(ratios[part.index], found)
                norms.add(own, adam_directions(values, states, {**group, "weight_decay": 0.0}), changes)
        sums = norms.totals()
        self.exchange.largest(ratios)
        largest = ratios.tolist()
        lengths: dict[ParameterPart, float] = {}
        for _, _, inside in turn.work:
            for part in inside:
                group, own_state = groups[part.group], part.entries(state)
                if frozen:
                    lengths[part] = _frozen_ratio(own_state, group, sums(part), largest[part.index])
                else:
                    lengths[part] = trust_ratio(*sums(part), group)
                    beta = float(group["coeff_beta"])
                    mean = beta * float(own_state.get("coefficient", 0.0)) + (1 - beta) * lengths[part]
                    own_state["coefficient"] = mean
        for inside, tile, view in each_tile(turn.work):
            for index, own in by_group(inside).items():
                self._move(own, view, state, groups[index], lengths)
            self.publish(tile, view)

    def _move(
        self,
        parts: Sequence[ParameterPart],
        view: TileView,
        state: State,
        group: Mapping[str, Any],
        lengths: Mapping[ParameterPart, float],
    ) -> None:
        """Move the values of a group's parts by so many times their direction."""
        states = [part.states(view, state, self.names) for part in parts]
        values = [part.of(view, view.master) for part in parts]
        changes = adam_directions(values, states, group)
        torch._foreach_mul_(changes, [-float(group["lr"]) * lengths[part] for part in parts])
        torch._foreach_add_(values, changes)


def _refresh(own: Mapping[str, Tensor], before: Tensor, group: Mapping[str, Any], *, is_first: bool) -> None:
    """Let the fresh variance learn from the gradient that the momentum's change implies."""
    beta1, beta2 = map(float, group["betas"])
    fresh = own["exp_avg_sq_fresh"]
    if is_first:
        fresh.copy_(own["exp_avg_sq"])
    gradient = (own["exp_avg"] - beta1 * before).div_(1 - beta1)
    fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def _largest_ratio(own: Mapping[str, Tensor], eps: float) -> Tensor:
    """Return the largest (sqrt(v frozen) + eps) / (sqrt(v fresh) + eps)."""
    return ((own["exp_avg_sq"].sqrt() + eps) / (own["exp_avg_sq_fresh"].sqrt() + eps)).max()


def _frozen_ratio(
    own: dict[str, Any], group: Mapping[str, Any], squares: tuple[float, float], largest: float
) -> float:
    """Return a parameter's ratio once the variance is frozen, and note its factor. ``squares``: sums of
    squares of the direction without and with weight decay.
    """
    factor = largest
    if group["weight_decay"] and squares[1] > 0:
        share = min(1.0, float((squares[0] / squares[1]) ** 0.5))
        factor = factor * share + (1 - share)
    factor = min(max(factor, float(group["factor_min"])), float(group["factor_max"]))
    last, threshold = float(own.get("factor", 1.0)), float(group["factor_threshold"])
    factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
    own["factor"] = factor
    return factor * float(own.get("coefficient", 1.0))
