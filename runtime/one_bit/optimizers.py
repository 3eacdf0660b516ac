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

    ``coeff_beta`` is the decay rate of that mean. The factor stays between ``factor_min`` and
    ``factor_max``, and changes by at most the share ``factor_threshold`` per step.
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
