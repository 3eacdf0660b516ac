"""Implements 1-bit Adam, 0/1 Adam and 1-bit LAMB: dense at first, then signs of momentum or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..collective_step.lamb import check_rates
from ..errors import OptimizerError


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
        """Raise OptimizerError: an engine's step has the other ranks' part of it."""
        raise OptimizerError(
            f"{type(self).__name__} compresses what ranks exchange: give it to zlaunch.initialize, and call "
            "engine.step()"
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
                    f"optimizer {name} needs the same {key} in all groups, not {wanted} and {own}: "
                    "ranks exchange signs of all parameters together"
                )
        group.update({key: first[key] for key in _COUNTERS if key in first})


def _check_count(name: str, **counts: int) -> None:
    for key, count in counts.items():
        if count != int(count) or count < 1:
            raise ValueError(f"{name}: {key} {count}: expected a whole number from 1 on")


class OneBitAdam(OneBitOptimizer):
    """Implements "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    Algorithm 1 (Tang et al., 2021): ``freeze_step`` steps of Adam, then its variance stays as it is, and the
    ranks exchange the signs of their momentum, with error feedback on both ways.

    ``freeze_step`` wants to be 15 to 25 % of all steps.
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
    2022): the ranks exchange signs of their gradients, but for steps in which the variance learns from dense
    ones. These are ``var_interval`` steps apart, which doubles after each ``var_update_scaler`` of them.

    After ``var_freeze_step`` steps it goes on as 1-bit Adam. With ``local_step_clipper`` above 1 ranks then
    exchange nothing but once in ``local_interval`` steps, which doubles after each ``local_step_scaler``
    steps up to ``local_step_clipper``; in between each rank has weights of its own. That is for stage 0
    alone, as ZeRO's later stages have one set of weights.
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
    Convergence Speed", Algorithm 1 (Li et al., 2021): ``freeze_step`` steps of LAMB, then as 1-bit Adam, with
    the mean of each parameter's past trust ratios times a factor: how far a variance that is kept fresh has
    left the frozen one.

    ``coeff_beta``: decay rate of that mean. The factor is between ``factor_min`` and ``factor_max``, and
    changes in a step by at most ``factor_threshold`` of itself.
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
