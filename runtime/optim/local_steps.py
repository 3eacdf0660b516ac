"""Steps each rank by its own gradients between two exchanges, as 0/1 Adam does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..errors import OptimizerError
from ..zero.store import Access, OpenTile, TileView, open_all
from ..zero.unit import Unit
from .collective import ParameterPart, by_group, cache_sized, each_tile
from .sign_exchange import Average, OneBitUnitStep, SignExchange, clear_without_variance
from .update_rule import State

Publish = Callable[[OpenTile, TileView], None]
_NAMES = ("exp_avg", "exp_avg_sq")


class LocalSteps:
    """Keeps how far this rank has gone since all ranks had the same weights.

    By Lu et al. (2022), Algorithm 1, with decay of the weights: in a step of its own a rank takes
    ``u += lr * m`` and ``x = z - u / (sqrt(v) + eps)``, where ``z`` are the weights that all had, decayed.
    Where ranks meet, the mean of ``u``, in signs, gives all of them the same ``x``, and divided by the sum of
    ``lr`` the same ``m``. For units that each rank has whole, in the memory of the device.
    """

    def __init__(self, exchange: SignExchange, comm: Comm) -> None:
        self._exchange = exchange
        self._comm = comm
        self._gone: dict[Unit, tuple[Tensor, Tensor]] = {}
        """Has a unit's ``z`` and ``u`` while ranks have weights of their own."""
        self._rates: dict[tuple[Unit, int], float] = {}
        """Adds up ``lr`` over the steps in which a unit's parameter had a gradient, meanwhile."""
        self._lost: dict[Unit, Tensor] = {}
        """Keeps what this rank's signs of a unit have lost."""

    @property
    def replicas_diverged(self) -> bool:
        """Return whether replicas differ between ranks: a local step was made since the last average."""
        return bool(self._gone)

    def forget_errors(self) -> None:
        """Forget what signs have lost."""
        self._lost.clear()

    def keep_only(self, units: Collection[Unit]) -> None:
        """Forget units that are not there any more."""
        for kept in (self._gone, self._lost):
            for unit in [each for each in kept if each not in units]:
                del kept[unit]
        for at in [at for at in self._rates if at[0] not in units]:
            del self._rates[at]

    def refuse_writes(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        """Raise OptimizerError where the script has changed weights that ranks have of their own, on any of
        them. Collective: a rank that raised alone would leave the others waiting for it where they meet.
        """
        names = [name for unit_step in unit_steps for name in unit_step.unit.names]
        counts = torch.zeros(len(names), dtype=torch.float64, device=self._comm.device)
        """Counts, for each parameter, its parts that were changed."""
        starts = itertools.accumulate((len(unit_step.unit.names) for unit_step in unit_steps), initial=0)
        for unit_step, start in zip(unit_steps, starts, strict=False):
            if (found := self._gone.get(unit_step.unit)) is None:
                continue
            assert unit_step.unit.store is not None
            with open_all(unit_step.unit.store, Access.READ) as tiles:
                for _, _, view in tiles:
                    for index, every in by_group(_with_moments(unit_step, view)).items():
                        for own in cache_sized(every, view.master.device):
                            _, _, roots = _moments(own, view, unit_step.state, unit_step.groups[index])
                            wanted = _placed(_of(own, found[0]), _of(own, found[1]), roots)
                            values = [part.of(view, view.master) for part in own]
                            for part, a, b in zip(own, values, wanted, strict=True):
                                # Bit for bit, because step() has written exactly these values. NaN is equal
                                # to nothing, also without a write.
                                counts[start + part.index] += ((a != b) & ~b.isnan()).any()
        found_on = self._comm.all_reduce_scalars(counts, "checks for weights that the script changed")
        if (found_on > 0).any():
            raise OptimizerError(
                f"the script changed {names[int(found_on.argmax())]}, its variance or eps between two "
                "exchanges of ZeroOneAdam, while weights differ between ranks: set local_step_clipper to "
                "1, or change them right after engine.save_checkpoint()"
            )

    def step(self, unit_step: OneBitUnitStep, gradient: Tensor, scale: float, publish: Publish) -> None:
        """Step a unit's parts by ``scale`` times this rank's ``gradient`` (flat, of the unit's size)."""
        origin, moved = self._start(unit_step)
        for inside, tile, view in each_tile(unit_step.work):
            for index, every in by_group(inside).items():
                group = unit_step.groups[index]
                rate = float(group["lr"])
                beta1 = float(group["betas"][0])
                for own in cache_sized(every, view.master.device):
                    first, second, roots = _moments(own, view, unit_step.state, group)
                    grads = [part.to(moved.dtype) for part in _of(own, gradient)]
                    torch._foreach_mul_(first, beta1)
                    torch._foreach_add_(first, grads, alpha=(1 - beta1) * scale)
                    clear_without_variance(first, second)
                    origins = _of(own, origin)
                    gone = _of(own, moved)
                    # The decay goes into z, so that x = z - u / (sqrt(v) + eps) is the whole weight.
                    torch._foreach_mul_(origins, 1 - rate * float(group["weight_decay"]))
                    torch._foreach_add_(gone, first, alpha=rate)
                    values = [part.of(view, view.master) for part in own]
                    torch._foreach_copy_(values, _placed(origins, gone, roots))
            publish(tile, view)
        self._count(unit_step)

    def _count(self, unit_step: OneBitUnitStep) -> None:
        """Note by which rates a unit's parameters were stepped; momentum without a gradient decays."""
        for part in unit_step.parts:
            group = unit_step.groups[part.group]
            if part.slice.used:
                at = unit_step.unit, part.index
                self._rates[at] = self._rates.get(at, 0.0) + float(group["lr"])
            elif part.slice.leaf is not None and "exp_avg" in unit_step.state.get(part.slice.leaf, {}):
                part.inside(unit_step.state[part.slice.leaf]["exp_avg"]).mul_(float(group["betas"][0]))

    def begin(self, unit_step: OneBitUnitStep) -> Average:
        """Begin to average a unit's ``u`` over the ranks. Collective."""
        _, moved = self._start(unit_step)
        lost = self._lost.get(unit_step.unit)
        if lost is None:
            lost = self._lost[unit_step.unit] = torch.zeros_like(moved)
        for start, stop in unit_step.unit.layout.gaps():
            # See Note [Gaps are zero] in zero/layout.py: compress() leaves the loss of 0, which it takes for
            # positive.
            lost[start:stop].zero_()
        return self._exchange.begin(unit_step.unit, lost, moved, alpha=1.0)

    def apply_average(self, unit_step: OneBitUnitStep, publish: Publish) -> None:
        """Apply the average of ``u``, in ``unit_step.averaged``. Then all ranks have the same weights."""
        assert unit_step.averaged is not None and unit_step.unit.store is not None
        origin, _ = self._gone.pop(unit_step.unit)
        with open_all(unit_step.unit.store, Access.MASTER) as tiles:
            for _, tile, view in tiles:
                for index, every in by_group(_with_moments(unit_step, view)).items():
                    rates = {part.index: self._rates.get((unit_step.unit, part.index)) for part in every}
                    gone = [part for part in every if rates[part.index]]
                    for own in cache_sized(gone, view.master.device):
                        first, second, roots = _moments(own, view, unit_step.state, unit_step.groups[index])
                        mean = _of(own, unit_step.averaged)
                        clear_without_variance(mean, second)
                        values = [part.of(view, view.master) for part in own]
                        torch._foreach_copy_(values, _placed(_of(own, origin), mean, roots))
                        # The mean of u divided by the sum of lr is the mean momentum of these steps.
                        torch._foreach_div_(mean, [rates[part.index] or 1.0 for part in own])
                        torch._foreach_copy_(first, mean)
                    for part in (part for part in every if rates[part.index] == 0.0):
                        # with a rate of 0 nobody has gone anywhere, but gradients have come into the momentum
                        own_moment = part.states(view, unit_step.state, _NAMES)["exp_avg"]
                        self._exchange.add_up(own_moment)
                        own_moment.div_(self._exchange.size)
                publish(tile, view)
        for at in [at for at in self._rates if at[0] is unit_step.unit]:
            del self._rates[at]

    def _start(self, unit_step: OneBitUnitStep) -> tuple[Tensor, Tensor]:
        """Return a unit's ``z`` and ``u``, which begin with the weights that all ranks have."""
        unit = unit_step.unit
        found = self._gone.get(unit_step.unit)
        if found is not None:
            return found
        assert unit.store is not None and is_whole(unit)
        wide = torch.promote_types(unit.dtype, torch.float32)
        origin = torch.zeros(unit.numel, dtype=wide, device=unit.device)
        with open_all(unit.store, Access.READ) as tiles:
            for _, _, view in tiles:
                origin[view.start : view.stop] = view.master
        found = self._gone[unit] = origin, torch.zeros_like(origin)
        return found


def is_whole(unit: Unit) -> bool:
    """Tell whether each rank has all of a unit's weights, in the memory of the device."""
    return unit.stop - unit.start == unit.numel and unit.store is not None and unit.store.on_device


def refuse_local_steps(most: int, reasons: Mapping[str, bool]) -> None:
    """Raise OptimizerError where an optimizer is to make local steps (``most``, its local_step_clipper, above
    1) and a reason against it holds.
    """
    for reason in (text for text, holds in reasons.items() if holds):
        if most > 1:
            raise OptimizerError(
                f"ZeroOneAdam: local_step_clipper {most} needs whole weights on each rank, but {reason}: "
                "set local_step_clipper to 1"
            )


def _with_moments(unit_step: OneBitUnitStep, view: TileView) -> list[ParameterPart]:
    """List a unit's parts in a tile that have been trained."""
    state = unit_step.state
    return [
        part
        for part in unit_step.parts
        if part.is_in(view) and part.slice.leaf is not None and "exp_avg_sq" in state.get(part.slice.leaf, {})
    ]


def _of(parts: Sequence[ParameterPart], whole: Tensor) -> list[Tensor]:
    """Return the elements of parts in a tensor of the unit's size."""
    return [whole[part.low : part.high] for part in parts]


def _moments(
    parts: Sequence[ParameterPart], view: TileView, state: State, group: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the moments m and v of parts, and sqrt(v) + eps as new tensors."""
    states = [part.states(view, state, _NAMES) for part in parts]
    second = [each["exp_avg_sq"] for each in states]
    roots = list(torch._foreach_sqrt(second))
    torch._foreach_add_(roots, float(group["eps"]))
    return [each["exp_avg"] for each in states], second, roots


def _placed(origins: Sequence[Tensor], gone: Sequence[Tensor], roots: Sequence[Tensor]) -> list[Tensor]:
    """Return z - u / (sqrt(v) + eps), as new tensors."""
    found = list(torch._foreach_div(list(gone), list(roots)))
    torch._foreach_neg_(found)
    torch._foreach_add_(found, list(origins))
    return found
