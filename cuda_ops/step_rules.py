"""Chooses the kernel that steps an optimizer's pieces in one pass, and makes its arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import AdamArgs, Scalar, SgdArgs
from .step import adam_step, sgd_step

_VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable")
"""Names the variants of torch's optimizers that no kernel has."""


class StepRule(ABC):
    """Steps flat fp32 pieces of a class of optimizers by one kernel."""

    def fits(self, group: Mapping[str, Any]) -> bool:
        """Tell whether the kernel computes what a param group asks for."""
        return not any(group.get(key) for key in _VARIANTS)

    @abstractmethod
    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> Any:
        """Make the kernel's arguments for a param group, once for all its pieces."""

    def count(
        self, leaves: Sequence[Tensor], state: MutableMapping[Tensor, dict[str, Any]], advance: Scalar
    ) -> None:
        """Add ``advance`` to the step counts of all pieces, before they are stepped."""

    @abstractmethod
    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        """Step one piece with its optimizer state ``own``, which is made where it is missing."""


def common_args(group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> dict[str, Any]:
    """Return the arguments that all kernels take."""
    decay = float(group["weight_decay"])
    return {"lr": group["lr"], "weight_decay": decay, "multiplier": multiplier, "found_inf": found_inf}


class AdamRule(StepRule):
    """Steps torch's fused Adam and AdamW."""

    def __init__(self, *, decoupled: bool) -> None:
        """``decoupled``: weight decay always acts on the parameter, not on the gradient."""
        self._decoupled = decoupled

    def fits(self, group: Mapping[str, Any]) -> bool:
        return super().fits(group) and bool(group.get("fused"))

    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> AdamArgs:
        beta1, beta2 = map(float, group["betas"])
        return AdamArgs(
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            decoupled=self._decoupled or bool(group.get("decoupled_weight_decay")),
            **common_args(group, multiplier, found_inf),
        )

    def count(
        self, leaves: Sequence[Tensor], state: MutableMapping[Tensor, dict[str, Any]], advance: Scalar
    ) -> None:
        for leaf in leaves:
            own = state.setdefault(leaf, {})
            count = own.get("step", 0.0)
            if not isinstance(count, Tensor):  # torch's fused step has it on the device, too
                own["step"] = torch.full((), float(count), device=leaf.device)
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in own:
                    own[key] = torch.zeros_like(leaf.detach())
        counts = [state[leaf]["step"] for leaf in leaves]
        if isinstance(advance, Tensor):  # a list, or torch may ask for the number
            torch._foreach_add_(counts, [advance] * len(counts))
        else:
            torch._foreach_add_(counts, advance)

    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        adam_step(leaf, own["exp_avg"], own["exp_avg_sq"], grad, out, own["step"], args)


class SgdRule(StepRule):
    """Steps torch's SGD."""

    def fits(self, group: Mapping[str, Any]) -> bool:
        return super().fits(group) and not group.get("foreach")

    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> SgdArgs:
        return SgdArgs(
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            **common_args(group, multiplier, found_inf),
        )

    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        first = own.get("momentum_buffer") is None
        if first and args.momentum:
            own["momentum_buffer"] = torch.zeros_like(leaf)
        sgd_step(leaf, own.get("momentum_buffer"), grad, out, 1.0 if first else 2.0, args)


_RULES: dict[type[torch.optim.Optimizer], StepRule] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SgdRule(),
}


def rule_of(optimizer: torch.optim.Optimizer) -> StepRule | None:
    """Return the rule of an optimizer's class: torch's, or a class's own ``step_rule``. A subclass, which may
    step in another way, has none.
    """
    kind = type(optimizer)
    own = vars(kind).get("step_rule")
    return own if isinstance(own, StepRule) else _RULES.get(kind)
