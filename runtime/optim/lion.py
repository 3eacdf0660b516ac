"""Implements Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...cuda_ops.arguments import LionArgs
from ...cuda_ops.step import lion_step


class Lion(torch.optim.Optimizer):
    """Implements "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023), Algorithm 2.

    ``lr`` wants to be three to ten times smaller than AdamW's, ``weight_decay`` larger by as much.
    """

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
            args = LionArgs(
                lr=group["lr"],
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                weight_decay=float(group["weight_decay"]),
                multiplier=1.0,
            )
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                if parameter.dtype != torch.float32:
                    _step_wide(parameter, state["exp_avg"], group)
                    continue
                lion_step(
                    parameter.detach().view(-1),
                    state["exp_avg"].view(-1),
                    parameter.grad.view(-1),
                    None,
                    args,
                )
        return result


def _step_wide(parameter: torch.Tensor, average: torch.Tensor, group: dict[str, Any]) -> None:
    """Step a parameter whose dtype the kernel does not support by torch's operations."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    direction = (average * beta1 + parameter.grad * (1 - beta1)).sign_()
    parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-float(lr))
    average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)  # type: ignore[arg-type]  # it has one
