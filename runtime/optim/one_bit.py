"""Steps 1-bit optimizers: decides what the ranks exchange, keeps errors, and updates the shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...cuda_ops.signs import frozen_adam
from ..comm.collectives import Comm
from ..device import to_device
from ..errors import OptimizerError
from ..zero.reduce import GradientReducer
from ..zero.store import Access, TileView, open_all, squares_of
from ..zero.unit import Unit
from .collective import CollectiveStep, ParameterPart, by_group, cache_sized, each_tile, parts_of, work_on
from .lamb import Norms, check_rates, trust_ratio
from .local_steps import LocalSteps, is_whole, refuse_local_steps
from .sign_exchange import Average, OneBitUnitStep, SignExchange
from .slices import ShardSlice
from .update_rule import State, UpdateRule

# -- optimizers -------------------------------------------------------------------------------------
#
# Implements 1-bit Adam, 0/1 Adam and 1-bit LAMB: dense at first, then signs of momentum or gradients.


class OneBitOptimizer(torch.optim.Optimizer):
    """Is the base of optimizers that ranks step together, with little traffic; they need an engine.

    None corrects the moments' bias, as in the papers. Errors of compression stay on their rank: they are not
    saved, and begin anew after a load. The groups' ``step_count`` counts steps.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        rates = {key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        check_rates(type(self).__name__, **rates)
        super().__init__(params, {**defaults, "betas": tuple(defaults["betas"]), "step_count": 0})

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Raise OptimizerError: call ``engine.step()``, which communicates with the other ranks."""
        raise OptimizerError(
            f"{type(self).__name__} compresses communication between ranks: pass it to zlaunch.initialize, "
            "and call engine.step()"
        )


_COMMON = ("betas", "freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_COUNTERS = ("step_count", "var_interval", "var_counter", "local_interval", "local_counter")


def agree_on_phase(name: str, groups: Sequence[dict[str, Any]]) -> None:
    """Give all groups the first one's counters, which a later group does not have yet. Raises OptimizerError
    where groups differ in what decides what the ranks exchange.
    """
    first = groups[0]
    for group in groups[1:]:
        for key in (key for key in _COMMON if key in first):
            own, wanted = (tuple(v) if key == "betas" else v for v in (group[key], first[key]))
            if own != wanted:
                raise OptimizerError(
                    f"optimizer {name} needs the same {key} in all groups, not {wanted} and {own}: one "
                    "exchange covers all parameters"
                )
        group.update({key: first[key] for key in _COUNTERS if key in first})


def _check_count(name: str, **counts: int) -> None:
    for key, count in counts.items():
        if count != int(count) or count < 1:
            raise ValueError(f"{name}: {key} {count}: expected a positive integer")


class OneBitAdam(OneBitOptimizer):
    """Implements "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    Algorithm 1 (Tang et al., 2021).

    After ``freeze_step`` steps of Adam, the variance is frozen, and ranks exchange only the signs of their
    momentum, with error feedback in both directions. Set ``freeze_step`` to 15 to 25 % of all steps.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        freeze_step: Uncompressed steps before the variance is frozen.
        betas: Decay rates of the two moments, equal in all groups.
        eps: Added to the denominator.
        weight_decay: Weight decay, added to the update direction.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _check_count("OneBitAdam", freeze_step=freeze_step)
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**rates, "freeze_step": int(freeze_step)})


class ZeroOneAdam(OneBitOptimizer):
    """Implements "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (Lu et al.,
    2022).

    Ranks exchange the signs of their gradients. Every ``var_interval`` steps, they exchange dense gradients
    and update the variance; the interval doubles after each ``var_update_scaler`` updates. After
    ``var_freeze_step`` steps, the optimizer continues as 1-bit Adam.

    With ``local_step_clipper`` above 1, ranks then exchange only every ``local_interval`` steps. That
    interval doubles after each ``local_step_scaler`` steps, up to ``local_step_clipper``. Between exchanges,
    weights differ between ranks, so this needs stage 0.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        var_freeze_step: Steps before the variance is frozen.
        var_update_scaler: Variance updates before their interval doubles.
        betas: Decay rates of the two moments, equal in all groups.
        eps: Added to the denominator.
        weight_decay: Weight decay, added to the update direction.
        local_step_scaler: Steps with a frozen variance before the interval between exchanges doubles.
        local_step_clipper: Maximum steps between two exchanges; 1 exchanges in each step.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 1,
    ) -> None:
        _check_count("ZeroOneAdam", var_freeze_step=var_freeze_step, var_update_scaler=var_update_scaler)
        _check_count(
            "ZeroOneAdam", local_step_scaler=local_step_scaler, local_step_clipper=local_step_clipper
        )
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        counts = {"freeze_step": int(var_freeze_step), "var_update_scaler": int(var_update_scaler)}
        local = {
            "local_step_scaler": int(local_step_scaler),
            "local_step_clipper": int(local_step_clipper),
            "local_interval": 1,
            "local_counter": 0,
        }
        super().__init__(params, {**rates, **counts, "var_interval": 1, "var_counter": 0, **local})


class OneBitLamb(OneBitOptimizer):
    """Implements "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
    Convergence Speed", Algorithm 1 (Li et al., 2021).

    After ``freeze_step`` steps of LAMB, ranks exchange signs as in 1-bit Adam. The trust ratio is then the
    mean of each parameter's past trust ratios times a factor, which measures how far an updated variance has
    moved from the frozen one.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        freeze_step: Uncompressed steps before the variance is frozen.
        betas: Decay rates of the two moments, equal in all groups.
        eps: Added to the denominator.
        weight_decay: Weight decay, added to the update direction.
        min_coeff: Minimum trust ratio.
        max_coeff: Maximum trust ratio.
        coeff_beta: Decay rate of the mean of past trust ratios.
        factor_min: Minimum factor.
        factor_max: Maximum factor.
        factor_threshold: Maximum relative change of the factor in one step.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
    ) -> None:
        _check_count("OneBitLamb", freeze_step=freeze_step)
        ordered = 0 <= min_coeff <= max_coeff and 0 < factor_min <= factor_max
        if not ordered or not 0 <= coeff_beta < 1 or not 0 <= factor_threshold < 1:
            given = f"coeff {min_coeff} to {max_coeff}, factor {factor_min} to {factor_max}"
            given += f", coeff_beta {coeff_beta}, factor_threshold {factor_threshold}"
            raise ValueError(f"OneBitLamb: {given}: out of range")
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        coefficients = {"min_coeff": min_coeff, "max_coeff": max_coeff, "coeff_beta": coeff_beta}
        factors = {
            "factor_min": factor_min,
            "factor_max": factor_max,
            "factor_threshold": factor_threshold,
        }
        super().__init__(params, {**rates, "freeze_step": int(freeze_step), **coefficients, **factors})


# -- step -------------------------------------------------------------------------------------------


class OneBitStep(CollectiveStep):
    """Steps the optimizers of ``one_bit``, unit by unit.

    A rank has whole gradients of its own in a step that exchanges signs: the reducer has left them as they
    are. Where they are reduced already (the first steps, and the first of a new engine), the step is dense.
    ``_kept`` has, for each unit, what goes into the next exchange besides the gradient: errors, and of
    momentum the part that stays.
    """

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        super().__init__(units, comm)
        self.exchange = SignExchange(comm)
        self._kept: dict[Unit, Tensor] = {}
        self._beta1 = 0.0
        """Says how much of the momentum is in ``_kept``."""
        self._of_momentum = False
        """Tells whether ``_kept`` belongs to exchanges of momentum, not of gradients."""
        self._trained: dict[Unit, list[bool]] = {}
        """Has, for each parameter of a unit, whether it has a variance; the same on all ranks, also on those
        that keep no part of the parameter.
        """

    def forget(self) -> None:
        """Forget errors: they are not those of the state that has been loaded."""
        self.forget_errors()
        self._of_momentum = False
        self._trained.clear()

    def forget_errors(self) -> None:
        """Forget what goes into the next exchange besides gradients: it has been of something else.

        See Note [Error feedback] in sign_exchange.py.
        """
        self._kept.clear()
        self.exchange.forget()

    def keep_only(self, units: Collection[Unit]) -> None:
        """Forget units that are not there any more."""
        for unit in [each for each in self._kept if each not in units]:
            del self._kept[unit]
        self.exchange.keep_only(units)
        for unit in [each for each in self._trained if each not in units]:
            del self._trained[unit]

    def own_squares(self) -> list[Tensor]:
        """Return the sums of squares of this rank's gradients where they are not reduced, so that the norm is
        the root of the mean of all ranks' squares; it is at least the norm of their average.
        """
        if not self.units or not self._reducer.skips_reduction:
            return []
        size = self.comm.world_size
        found = squares_of([self._reducer.whole_gradient(unit) for unit in self.units])
        return [square * size for square in found]

    @property
    def _reducer(self) -> GradientReducer:
        """Return what collects the gradients of all units."""
        reducer = self.units[0].gradients
        assert reducer is not None
        return reducer

    def prepare(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Raise OptimizerError where groups are in different phases, or a parameter is trained for the first
        time in a step from which the variance learns nothing.
        """
        groups = rule.optimizer.param_groups
        agree_on_phase(type(rule.optimizer).__name__, groups)
        self._find_trained(slices, rule.optimizer.state)
        following = _following(groups[0])
        # The step has not begun, so its count is one more than the groups have.
        is_frozen = following["step_count"] > following["freeze_step"]
        learns = not is_frozen and (self.wants_dense(following) or not self._reducer.skips_reduction)
        flags = iter(used)
        for unit in self.units:
            trained = self._trained[unit]
            for index, slot in enumerate(unit.layout.slots):
                # what has no elements, or no optimizer, never has a variance
                if not next(flags) or trained[index] or not slot.numel or slot.group < 0:
                    continue
                if not learns:
                    raise OptimizerError(
                        f"{unit.names[index]} gets its first gradient in step {following['step_count']}, "
                        "after the optimizer froze its variance: train it from the first step on, freeze "
                        "it (requires_grad_(False)) for the whole run, or use AdamW"
                    )
                trained[index] = True

    def _find_trained(self, slices: Sequence[ShardSlice], state: State) -> None:
        """Agree on which parameters have a variance, for units where this is not known: new ones, and all of
        them after a load. Collective if there are some, which is the case on all ranks or on none.
        """
        new = [unit for unit in self.units if unit not in self._trained]
        if not new:
            return
        own = {unit: [0.0] * len(unit.parameters) for unit in new}
        for part in parts_of(slices):
            kept = part.slice.on_disk if part.slice.leaf is None else state.get(part.slice.leaf, {})
            if part.unit in own and "exp_avg_sq" in kept:
                own[part.unit][part.index] = 1.0
        # By all ranks: a rank without a part of a parameter cannot know whether it has been trained, and has
        # to raise with the others.
        flags = torch.tensor([flag for unit in new for flag in own[unit]], dtype=torch.float64)
        counts = self.comm.all_reduce_scalars(
            to_device(flags, self.comm.device), "agrees on which parameters are trained"
        )
        found = iter(counts.tolist())
        for unit in new:
            self._trained[unit] = [next(found) > 0 for _ in unit.parameters]

    def run(self, rule: UpdateRule, parts: Sequence[ParameterPart], state: State) -> None:
        groups = rule.optimizer.param_groups
        for group in groups:
            group["step_count"] += 1
        first = groups[0]
        reducer = self._reducer
        frozen = first["step_count"] > first["freeze_step"]
        if reducer.skips_reduction and self.wants_dense(first):
            self._reduce()  # a load has brought the state of an earlier step
            reducer.skips_reduction = False
        self.keep_only(set(self.units))
        # Errors of gradients are not errors of momentum: see Note [Error feedback] in sign_exchange.py.
        of_momentum = reducer.skips_reduction and frozen
        if of_momentum is not self._of_momentum:
            self.forget_errors()
            self._of_momentum = of_momentum
        unit_steps = self.unit_steps(groups, parts, state, divisor=float(rule.divisor), frozen=frozen)
        if reducer.skips_reduction:
            self.step_apart(unit_steps)
        else:
            self.step_together(unit_steps)
        self.plan_next(groups)
        # Decided now, because the reducer asks during the next backward pass. Every rank decides alike, by
        # the groups' counters.
        reducer.skips_reduction = not self.wants_dense(_following(first))

    def unit_steps(
        self,
        groups: Sequence[dict[str, Any]],
        parts: Sequence[ParameterPart],
        state: State,
        *,
        divisor: float,
        frozen: bool,
    ) -> list[OneBitUnitStep]:
        """Describe a step of all units."""
        by_unit: dict[int, list[ParameterPart]] = {id(unit): [] for unit in self.units}
        for part in parts:
            by_unit[id(part.unit)].append(part)
        return [
            OneBitUnitStep(unit, own, work_on(own), groups, divisor, state, frozen)
            for unit, own in ((unit, by_unit[id(unit)]) for unit in self.units)
        ]

    def step_together(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        """Update all units by averaged gradients."""
        for unit_step in unit_steps:
            self.step_unit(unit_step)

    def step_apart(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        """Update all units where each rank has gradients of its own. Collective."""
        for unit_step in self.averaged(unit_steps, self._begin):
            self.step_unit(unit_step)
        # `_kept` has this share of the last momentum until the next exchange.
        self._beta1 = float(unit_steps[0].groups[0]["betas"][0])

    def wants_dense(self, group: Mapping[str, Any]) -> bool:
        """Tell whether the step with the group's count needs the ranks' gradients averaged."""
        return bool(group["step_count"] <= group["freeze_step"])

    def plan_next(self, groups: Sequence[dict[str, Any]]) -> None:
        """Change what decides about the next steps."""

    @abstractmethod
    def step_unit(self, unit_step: OneBitUnitStep) -> None:
        """Update a unit's parts and publish their tiles."""

    def _reduce(self) -> None:
        """Sum up gradients that were left to each rank."""
        for unit in self.units:
            whole = self._reducer.whole_gradient(unit)
            self.exchange.add_up(whole)
            assert unit.store is not None
            unit.store.add_grad(whole[unit.start : unit.stop], first=True, stays=True)

    def averaged(
        self, unit_steps: Sequence[OneBitUnitStep], begin: Callable[[OneBitUnitStep], Average]
    ) -> Iterator[OneBitUnitStep]:
        """Yield unit steps with their exchanged average. One unit's hop overlaps another's computation."""
        # All ranks serve one unit and then begin the next one, in this order: both are collectives of one
        # group.
        coming = begin(unit_steps[0])
        for unit_step, following in zip_longest(unit_steps, unit_steps[1:]):
            average = coming
            self.exchange.serve(average)
            if following is not None:
                coming = begin(following)
            unit = unit_step.unit
            place = (
                self.comm.device if unit.store is not None and unit.store.on_device else torch.device("cpu")
            )
            yield replace(unit_step, averaged=self.exchange.end(average)[unit.start : unit.stop].to(place))

    def _begin(self, unit_step: OneBitUnitStep) -> Average:
        """Begin to average a unit's gradients, or its momentum once the variance is frozen; keep errors."""
        unit = unit_step.unit
        beta1 = float(unit_step.groups[0]["betas"][0])
        gradient = self._reducer.whole_gradient(unit)
        kept = self._kept.get(unit)
        if kept is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            kept = self._kept[unit] = torch.zeros_like(gradient, dtype=wide)
            if unit_step.frozen:
                # The momentum so far is sharded. Each rank continues with the whole of it: m = beta1 * m + (1
                # - beta1) * g.
                kept.add_(self._whole_momentum(unit_step), alpha=beta1)
        elif unit_step.frozen and beta1 != self._beta1:
            self.exchange.add_last(unit, kept, beta1 - self._beta1)  # a schedule has changed it
        # `divisor` divides a sum over the ranks. Here each rank sends its own gradient and the exchange
        # takes the mean, so the world size cancels.
        share = self.comm.world_size / unit_step.divisor
        for start, stop in unit.layout.gaps():
            kept[start:stop].zero_()  # those of the gradient are zeros from the beginning
        # With `stays`, `kept` gets beta1 times the new mean in addition to the error: the part of the next
        # momentum that is known already.
        alpha, stays = ((1 - beta1) * share, beta1) if unit_step.frozen else (share, None)
        return self.exchange.begin(unit, kept, gradient, alpha=alpha, stays=stays)

    def _whole_momentum(self, unit_step: OneBitUnitStep) -> Tensor:
        """Return a unit's momentum of all ranks, of parameters without a gradient, too."""
        unit = unit_step.unit
        state = unit_step.state
        wide = torch.promote_types(unit.dtype, torch.float32)
        own = torch.zeros(unit.stop - unit.start, dtype=wide, device=self.comm.device)
        assert unit.store is not None
        with open_all(unit.store, Access.READ) as tiles:
            for _, _, view in tiles:
                for part in unit_step.parts:
                    found = part.slice.tensors_in(view, state) if part.is_in(view) else {}
                    if "exp_avg" in found:
                        start = part.low - unit.start
                        own[start : start + part.high - part.low] = part.inside(found["exp_avg"])
        return own if own.numel() == unit.numel else self.exchange.gather(own)


def _following(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's entries with the count of the step after."""
    return {**group, "step_count": group["step_count"] + 1}


class OneBitAdamStep(OneBitStep):
    """Steps OneBitAdam."""

    def step_unit(self, unit_step: OneBitUnitStep) -> None:
        for inside, tile, view in each_tile(unit_step.work):
            for index, every in by_group(inside).items():
                group = unit_step.groups[index]
                if unit_step.frozen and unit_step.averaged is not None:
                    every = [part for part in every if not self._in_one_pass(unit_step, part, view, group)]
                for own in cache_sized(every, view.master.device):
                    states = [part.states(view, unit_step.state, self.names) for part in own]
                    unit_step.bring_moments(own, view, states)
                    values = [part.of(view, view.master) for part in own]
                    changes = adam_directions(values, states, group)
                    torch._foreach_add_(values, changes, alpha=-float(group["lr"]))
            self.publish(tile, view)

    def _in_one_pass(
        self, unit_step: OneBitUnitStep, part: ParameterPart, view: TileView, group: Mapping[str, Any]
    ) -> bool:
        """Update a part by what signs have brought, if there is a kernel; tell whether."""
        assert unit_step.averaged is not None
        own = part.states(view, unit_step.state, self.names)
        at = unit_step.unit.start
        momentum = unit_step.averaged[part.low - at : part.high - at]
        rates = {key: float(group[key]) for key in ("lr", "weight_decay", "eps")}
        return frozen_adam(part.of(view, view.master), own["exp_avg"], own["exp_avg_sq"], momentum, **rates)


def adam_directions(
    values: list[Tensor], states: Sequence[dict[str, Tensor]], group: Mapping[str, Any]
) -> list[Tensor]:
    """Return m / (sqrt(v) + eps) + weight_decay * w, as new tensors."""
    below = list(torch._foreach_sqrt([each["exp_avg_sq"] for each in states]))
    torch._foreach_add_(below, float(group["eps"]))
    found = list(torch._foreach_div([each["exp_avg"] for each in states], below))
    if group["weight_decay"]:
        torch._foreach_add_(found, values, alpha=float(group["weight_decay"]))
    return found


class ZeroOneAdamStep(OneBitAdamStep):
    """Steps ZeroOneAdam."""

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        super().__init__(units, comm)
        self._local = LocalSteps(self.exchange, comm)

    def forget_errors(self) -> None:
        super().forget_errors()
        self._local.forget_errors()

    def prepare(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Raise OptimizerError also where the script has changed what ranks have of their own, on any rank,
        and where this step is one of a rank's own, but ranks do not have what that needs.
        """
        groups = rule.optimizer.param_groups
        following = _following(groups[0])
        is_apart = self._reducer.skips_reduction and not self.wants_dense(following)
        if is_apart and following["step_count"] > following["freeze_step"]:
            refuse_local_steps(
                int(following["local_step_clipper"]),
                {
                    "they are sharded or offloaded": not all(map(is_whole, self.units)),
                    "sequence parallelism is on": self.comm.mesh.sequence > 1,
                },
            )
        self._refuse_writes(groups, slices, rule.optimizer.state)
        super().prepare(rule, slices, used)  # last: it notes what will have been trained

    def _refuse_writes(
        self, groups: Sequence[dict[str, Any]], slices: Sequence[ShardSlice], state: State
    ) -> None:
        if self._local.replicas_diverged:
            self._local.refuse_writes(
                self.unit_steps(groups, parts_of(slices), state, divisor=1.0, frozen=True)
            )

    def keep_only(self, units: Collection[Unit]) -> None:
        """Forget units that are not there any more."""
        super().keep_only(units)
        self._local.keep_only(units)

    def step_together(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        """Update all units by averaged gradients, from weights that all ranks have."""
        self._end_local_steps(unit_steps)
        super().step_together(unit_steps)

    def step_apart(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        """Update all units: once the variance is frozen by local steps, if the optimizer makes them."""
        first = unit_steps[0].groups[0]
        if not unit_steps[0].frozen or first["local_step_clipper"] <= 1:
            self._end_local_steps(unit_steps)
            super().step_apart(unit_steps)
            return
        # Errors of exchanged momentum, which local steps do not continue.
        if self._kept:
            self.forget_errors()
        for unit_step in unit_steps:
            own = self._reducer.whole_gradient(unit_step.unit)
            self._local.step(unit_step, own, self.comm.world_size / unit_step.divisor, self.publish)
        if first["step_count"] % min(first["local_interval"], first["local_step_clipper"]) == 0:
            self._average_replicas(unit_steps)

    def _end_local_steps(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        """Average the replicas if the script has reset what allowed local steps, such as the step count."""
        if self._local.replicas_diverged:
            self._average_replicas(unit_steps)
            self.forget_errors()

    def _average_replicas(self, unit_steps: Sequence[OneBitUnitStep]) -> None:
        for unit_step in self.averaged(unit_steps, self._local.begin):
            self._local.apply_average(unit_step, self.publish)

    @property
    def replicas_diverged(self) -> bool:
        """Return whether replicas differ between ranks, after local steps."""
        return self._local.replicas_diverged

    def sync_replicas(
        self,
        groups: Sequence[dict[str, Any]],
        slices: Sequence[ShardSlice],
        state: State,
        *,
        keeps_writes: bool,
    ) -> None:
        """Give all ranks the same weights and moments, as an exchange does. Collective, between two steps.
        Raises OptimizerError where ``keeps_writes`` and the script has changed what ranks have of their own.
        """
        with torch.no_grad():
            if keeps_writes:
                self._refuse_writes(groups, slices, state)
            unit_steps = self.unit_steps(groups, parts_of(slices), state, divisor=1.0, frozen=True)
            self._average_replicas(unit_steps)
            self.await_uploads()
            for unit in self.units:
                if unit.store is not None:
                    unit.store.publish(copy_is_new=True)
                unit.refresh()
                unit.wait_unsharded()
                unit.stepped()

    def wants_dense(self, group: Mapping[str, Any]) -> bool:
        return super().wants_dense(group) and group["step_count"] % group["var_interval"] == 0

    def plan_next(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            if self.wants_dense(group):
                group["var_counter"] += 1
                if group["var_counter"] == group["var_update_scaler"]:
                    group["var_counter"] = 0
                    group["var_interval"] *= 2
            if group["step_count"] > group["freeze_step"]:
                group["local_counter"] += 1
                if group["local_counter"] == group["local_step_scaler"]:
                    group["local_counter"] = 0
                    group["local_interval"] = min(group["local_step_clipper"], 2 * group["local_interval"])


# -- lamb step --------------------------------------------------------------------------------------
#
# Steps 1-bit LAMB: two passes over a unit's shards, since trust ratios need whole parameters.


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

    def step_unit(self, unit_step: OneBitUnitStep) -> None:
        unit = unit_step.unit
        groups = unit_step.groups
        state = unit_step.state
        frozen = unit_step.frozen
        norms = Norms(self.comm, [unit])
        ratios = torch.zeros(len(unit.parameters), dtype=torch.float64, device=self.comm.device)
        """Holds how far the frozen denominators are above fresh ones."""
        for inside, _, view in each_tile(unit_step.work):
            for index, own in by_group(inside).items():
                group = groups[index]
                states = [part.states(view, state, self.names) for part in own]
                before = [each["exp_avg"].clone() for each in states] if frozen else []
                unit_step.bring_moments(own, view, states)
                values = [part.of(view, view.master) for part in own]
                changes = adam_directions(values, states, group)
                if not frozen:
                    norms.add(own, values, changes)
                    continue
                for part, each, old in zip(own, states, before, strict=True):
                    _refresh(each, old, group, is_first="factor" not in part.entries(state))
                    found = _largest_ratio(each, float(group["eps"])).to(ratios)
                    ratios[part.index] = torch.maximum(ratios[part.index], found)
                # The squares of the direction without weight decay take the place of the values', which are
                # not needed here.
                norms.add(own, adam_directions(values, states, {**group, "weight_decay": 0.0}), changes)
        sums = norms.totals()
        # A parameter may lie on several ranks; the factor is of the whole.
        self.exchange.largest(ratios)
        largest = ratios.tolist()
        lengths: dict[ParameterPart, float] = {}
        for _, _, inside in unit_step.work:
            for part in inside:
                group = groups[part.group]
                own_state = part.entries(state)
                if frozen:
                    lengths[part] = _frozen_ratio(own_state, group, sums(part), largest[part.index])
                else:
                    lengths[part] = trust_ratio(*sums(part), group)
                    beta = float(group["coeff_beta"])
                    mean = beta * float(own_state.get("coefficient", 0.0)) + (1 - beta) * lengths[part]
                    own_state["coefficient"] = mean
        for inside, tile, view in each_tile(unit_step.work):
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
    # Solved for g in m = beta1 * m_before + (1 - beta1) * g: after the exchange, no rank has the mean
    # gradient itself.
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
        # The factor corrects the part of the direction that the variance scales, not the weight decay.
        share = min(1.0, float((squares[0] / squares[1]) ** 0.5))
        factor = factor * share + (1 - share)
    factor = min(max(factor, float(group["factor_min"])), float(group["factor_max"]))
    last = float(own.get("factor", 1.0))
    threshold = float(group["factor_threshold"])
    # Also bound the change per step: `factor` is a maximum over elements, and one outlier must not set it.
    factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
    own["factor"] = factor
    return factor * float(own.get("coefficient", 1.0))
