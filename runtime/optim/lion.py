"""Implements Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...cuda_ops.arguments import LionArgs, Scalar
from ...cuda_ops.step import StepRule, common_args, lion_step


class LionRule(StepRule):
    """Steps :class:`Lion`."""

    def states(self, group: Mapping[str, Any]) -> Sequence[str]:
        return ("exp_avg",)

    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> LionArgs:
        beta1, beta2 = map(float, group["betas"])
        return LionArgs(beta1=beta1, beta2=beta2, **common_args(group, multiplier, found_inf))

    def run(self, leaf: Tensor, grad: Tensor, out: Tensor | None, own: dict[str, Any], args: Any) -> None:
        if "exp_avg" not in own:
            own["exp_avg"] = torch.zeros_like(leaf)
        lion_step(leaf, own["exp_avg"].view(-1), grad, out, args)


class Lion(torch.optim.Optimizer):
    """Implements "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023), Algorithm 2.

    Set ``lr`` three to ten times smaller than for AdamW, and ``weight_decay`` larger by the same factor.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate: the length of each element's step.
        betas: Decay rates of the update direction and of the momentum.
        weight_decay: Decoupled weight decay, multiplied by ``lr``.

    Raises:
        ValueError: An argument is out of range.
    """

    step_rule: ClassVar[StepRule] = LionRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion: lr {lr}, betas {betas}, weight_decay {weight_decay}: out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            args = self.step_rule.args(group, 1.0, None)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own = self.state[parameter]
                if not own:
                    own["exp_avg"] = torch.zeros_like(parameter)
                if parameter.dtype == torch.float32:
                    flat = parameter.detach().view(-1)
                    self.step_rule.run(flat, parameter.grad.view(-1), None, own, args)
                else:
                    _step_wide(parameter, own["exp_avg"], group)
        return result


def _step_wide(parameter: torch.Tensor, average: torch.Tensor, group: dict[str, Any]) -> None:
    """Step a parameter whose dtype the kernel does not support by torch's operations."""
    lr = group["lr"]
    (beta1, beta2) = group["betas"]
    # From the average before this gradient, by beta1; the average learns below, by beta2 (Algorithm 2).
    direction = (average * beta1 + parameter.grad * (1 - beta1)).sign_()
    parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-float(lr))
    average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)  # type: ignore[arg-type]  # it has one
