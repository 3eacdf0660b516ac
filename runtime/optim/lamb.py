"""Implements LAMB, whose step has the length of each parameter's norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..device import to_device
from ..zero.store import TileView, squares_of
from ..zero.unit import Unit
from .collective import CollectiveStep, ParameterPart, by_group, each_tile, gradients, work_on
from .update_rule import State, UpdateRule

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(torch.optim.Optimizer):
    """Implements "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2 (You
    et al., 2019).

    With ``r = m / (sqrt(v) + eps) + weight_decay * w`` and bias-corrected moments, each parameter moves by
    ``lr * ratio * r``. The ratio is ``|w| / |r|``, clamped to ``min_coeff`` and ``max_coeff``, or 1 if a
    norm is 0. With ``eps_inside_sqrt``, the root is ``sqrt(v + eps)``.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay, added to the update direction before its norm is taken.
        bias_correction: Correct the bias of the moments.
        min_coeff: Minimum trust ratio.
        max_coeff: Maximum trust ratio.
        eps_inside_sqrt: Add ``eps`` to the second moment before the square root.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        eps_inside_sqrt: bool = False,
    ) -> None:
        check_rates("Lamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"Lamb: min_coeff {min_coeff}, max_coeff {max_coeff}: out of range")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = self.state[parameter]
                if not own:
                    own |= {"step": torch.tensor(0.0)} | {
                        key: torch.zeros_like(parameter) for key in _MOMENTS
                    }
                own["step"] += 1
                first, second = ([own[key]] for key in _MOMENTS)
                update_moments(first, second, [parameter.grad], group["betas"])
                steps = [float(own["step"])]
                (change,) = directions([parameter.detach()], first, second, steps, group)
                value, moved = (float(each.double().square().sum()) for each in (parameter, change))
                parameter.sub_(change, alpha=float(group["lr"]) * trust_ratio(value, moved, group))
        return result


def check_rates(name: str, *, lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for coefficients out of range."""
    in_range = lr >= 0 and eps >= 0 and weight_decay >= 0 and len(betas) == 2
    if not in_range or not all(0 <= beta < 1 for beta in betas):
        given = f"lr {lr}, betas {tuple(betas)}, eps {eps}, weight_decay {weight_decay}"
        raise ValueError(f"{name}: {given}: out of range")


def update_moments(
    first: list[Tensor], second: list[Tensor], grads: list[Tensor], betas: tuple[float, float]
) -> None:
    """Add gradients to the moving averages of them and of their squares, in place."""
    beta1, beta2 = map(float, betas)
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)


def directions(
    values: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: Sequence[float],
    group: Mapping[str, Any],
) -> list[Tensor]:
    """Compute r for parameters or parts of them, as new tensors."""
    beta1, beta2 = map(float, group["betas"])
    corrected = bool(group.get("bias_correction"))
    scale1 = [1 - beta1**step if corrected else 1.0 for step in steps]
    scale2 = [1 - beta2**step if corrected else 1.0 for step in steps]
    found = list(torch._foreach_div(first, scale1))
    below = list(torch._foreach_div(second, scale2))
    eps = float(group["eps"])
    decay = float(group["weight_decay"])
    # r = m' / (sqrt(v') + eps) + weight_decay * w, with m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t).
    if group.get("eps_inside_sqrt"):
        torch._foreach_add_(below, eps)
    torch._foreach_sqrt_(below)
    if not group.get("eps_inside_sqrt"):
        torch._foreach_add_(below, eps)
    torch._foreach_div_(found, below)
    if decay:
        # Before the norm of r is taken: the decay is part of the direction that the trust ratio scales.
        torch._foreach_add_(found, values, alpha=decay)
    return found


def trust_ratio(value_square: float, change_square: float, group: Mapping[str, Any]) -> float:
    """Return the factor of a parameter's step, from the sums of squares of its value and of r."""
    # A parameter of zeros, such as a new bias, would never move at a ratio of 0.
    if value_square == 0 or change_square == 0:
        return 1.0
    ratio = float((value_square / change_square) ** 0.5)
    return min(max(ratio, float(group["min_coeff"])), float(group["max_coeff"]))


class LambStep(CollectiveStep):
    """Steps :class:`Lamb` in two passes over the shards: the moments and the sums of squares, which all ranks
    add up, then the values. The second computes r anew from the moments.
    """

    def run(self, rule: UpdateRule, parts: Sequence[ParameterPart], state: State) -> None:
        work = work_on(parts)
        groups = rule.optimizer.param_groups
        squares = Norms(self.comm, self.units)
        for inside, _, view in each_tile(work):
            for index, own in by_group(inside).items():
                first, second = moments_of(own, view, state)
                update_moments(
                    first, second, gradients(own, view, float(rule.divisor)), groups[index]["betas"]
                )
                steps = [part.count_step(state) for part in own]
                values = [part.of(view, view.master) for part in own]
                squares.add(own, values, directions(values, first, second, steps, groups[index]))
        # Between the passes, because a parameter may lie on several ranks and in several tiles. One
        # all-reduce for all parameters.
        sums = squares.totals()
        for inside, tile, view in each_tile(work):
            for index, own in by_group(inside).items():
                first, second = moments_of(own, view, state)
                group = groups[index]
                steps = [float(part.entries(state)["step"]) for part in own]
                values = [part.of(view, view.master) for part in own]
                # Computed again instead of kept: r of all parameters would take as much memory as a moment.
                changes = directions(values, first, second, steps, group)
                lr = float(group["lr"])
                torch._foreach_mul_(changes, [-lr * trust_ratio(*sums(part), group) for part in own])
                torch._foreach_add_(values, changes)
            self.publish(tile, view)


def moments_of(
    parts: Sequence[ParameterPart], view: TileView, state: State
) -> tuple[list[Tensor], list[Tensor]]:
    """Return both moments of parts of one tile."""
    found = [part.states(view, state, _MOMENTS) for part in parts]
    return [each["exp_avg"] for each in found], [each["exp_avg_sq"] for each in found]


class Norms:
    """Adds up, over all parts and ranks, the squares of each parameter's values and of its direction."""

    def __init__(self, comm: Comm, units: Sequence[Unit]) -> None:
        """Prepare to add up the parameters of some units, on all ranks the same."""
        self._comm = comm
        self._first: dict[int, int] = {}
        """Maps the identity of a unit to the number of its first parameter."""
        count = 0
        for unit in units:
            self._first[id(unit)] = count
            count += len(unit.parameters)
        # A row for each parameter of the model on every rank, so that sums of all ranks can be added up by
        # position.
        self._sums = torch.zeros(count, 2, dtype=torch.float64, device=self._comm.device)

    def add(self, parts: Sequence[ParameterPart], values: list[Tensor], changes: list[Tensor]) -> None:
        """Add the squares of parts in one memory."""
        squares = squares_of([*values, *changes])
        found = torch.stack(squares).view(2, -1).T.to(self._sums.device)
        # each of the ranks that keep a part adds it
        numbers = torch.tensor([(self._row(part), part.unit.copies) for part in parts])
        rows, copies = to_device(numbers, found.device).unbind(1)
        self._sums.index_add_(0, rows, found / copies.unsqueeze(1))

    def _row(self, part: ParameterPart) -> int:
        return self._first[id(part.unit)] + part.index

    def totals(self) -> Callable[[ParameterPart], tuple[float, float]]:
        """Return a function that gives a part's two sums. Collective."""
        sums = self._comm.all_reduce_scalars(self._sums.view(-1), "all-reduces parameter norms")
        pairs = sums.view(-1, 2).tolist()
        return lambda part: (pairs[self._row(part)][0], pairs[self._row(part)][1])
