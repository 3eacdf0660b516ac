"""DeepSpeed's optimizer classes: calling one makes the torch optimizer of that rule.

The engine steps it on flat shards with its own kernels, on the GPU or, offloaded, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zlaunch import optim
from zlaunch.optim import Lamb, Lion, UncorrectedAdam


class _Maker(type):
    """Calls make, ``isinstance`` asks, for the torch optimizers in ``kinds``."""

    kinds: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kinds)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)  # type: ignore[attr-defined]


class FusedAdam(metaclass=_Maker):
    """Adam, with decoupled weight decay unless ``adam_w_mode`` is False."""

    kinds = (torch.optim.Adam, torch.optim.AdamW, UncorrectedAdam)

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the torch optimizer. Raises ValueError for what would be another rule."""
        if not bias_correction:
            _refuse("Adam without bias correction", amsgrad=amsgrad)
            rates = (betas[0], betas[1])
            return UncorrectedAdam(params, lr, rates, eps, weight_decay, decoupled=adam_w_mode)
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return kind(
            params,
            lr=lr,
            betas=tuple(betas),  # type: ignore[arg-type]
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class DeepSpeedCPUAdam(metaclass=_Maker):
    """Adam with DeepSpeed's other spelling of the argument: ``adamw_mode``."""

    kinds = (torch.optim.Adam, torch.optim.AdamW, UncorrectedAdam)

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the torch optimizer. Raises ValueError for what would be another rule."""
        return FusedAdam.make(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


class FusedLamb(metaclass=_Maker):
    """LAMB. Its bias is corrected in the moments, as in the paper, not in the length of the step."""

    kinds = (Lamb,)

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("Lamb", max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        return Lamb(
            params,
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            bias_correction=bias_correction,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            eps_inside_sqrt=eps_inside_sqrt,
        )


def _refuse(kind: str, **given: Any) -> None:
    """Raise ValueError for arguments that would be another rule."""
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value} is not supported by {kind}")


class OnebitAdam(metaclass=_Maker):
    """1-bit Adam."""

    kinds = (optim.OneBitAdam,)

    @staticmethod
    def make(
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("OneBitAdam", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        rates: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return optim.OneBitAdam(params, freeze_step=freeze_step, **rates)


class OnebitLamb(metaclass=_Maker):
    """1-bit LAMB."""

    kinds = (optim.OneBitLamb,)

    @staticmethod
    def make(
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("OneBitLamb", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        options |= {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        return optim.OneBitLamb(params, freeze_step=freeze_step, **options)


class ZeroOneAdam(metaclass=_Maker):
    """0/1 Adam."""

    kinds = (optim.ZeroOneAdam,)

    @staticmethod
    def make(
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("ZeroOneAdam", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        rates: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return optim.ZeroOneAdam(
            params,
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
            **rates,
        )


class MuonWithAuxAdam(metaclass=_Maker):
    """Muon for groups with ``use_muon``, AdamW for the others."""

    kinds = (optim.Muon,)

    @staticmethod
    def make(param_groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the runtime's optimizer, with the defaults of the package ``muon``. Raises ValueError for a
        group without ``use_muon``, or with another key.
        """
        groups = []
        for index, group in enumerate(param_groups):
            if "use_muon" not in group:
                raise ValueError(f"MuonWithAuxAdam: param group {index} has no use_muon")
            muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
            adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
            given = {**(muon if group["use_muon"] else adam), **group}
            unknown = given.keys() - (muon if group["use_muon"] else adam) - {"params", "use_muon"}
            if unknown:
                raise ValueError(f"MuonWithAuxAdam: param group {index} has {', '.join(sorted(unknown))}")
            if not group["use_muon"]:
                given["adam_eps"] = given.pop("eps")
            groups.append(given)
        return optim.Muon(groups)


class FusedLion(metaclass=_Maker):
    """Lion."""

    kinds = (Lion,)

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer."""
        return Lion(params, lr=lr, betas=tuple(betas), weight_decay=weight_decay)  # type: ignore[arg-type]


class DeepSpeedCPULion(metaclass=_Maker):
    """Lion, under the name for the CPU."""

    kinds = (Lion,)

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer."""
        return FusedLion.make(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    """Adagrad."""

    kinds = (torch.optim.Adagrad,)

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the torch optimizer."""
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
