"""Implements Adam without bias correction (DeepSpeed's ``bias_correction: false``), which torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...cuda_ops.arguments import AdamArgs, Scalar
from ...cuda_ops.step import AdamRule, StepRule


class UncorrectedAdamRule(AdamRule):
    """Steps :class:`UncorrectedAdam`, as the entries of its groups say."""

    def fits(self, group: Mapping[str, Any]) -> bool:
        return True

    def args(self, group: Mapping[str, Any], multiplier: Scalar, found_inf: Scalar | None) -> AdamArgs:
        return replace(super().args(group, multiplier, found_inf), corrected=bool(group["bias_correction"]))


class UncorrectedAdam(torch.optim.Optimizer):
    """Implements Adam without bias correction, or AdamW if ``decoupled``.

    Groups with ``bias_correction`` True are corrected. Without correction, the first steps are longer than
    Adam's. The first is longer by ``(1 - beta1) / sqrt(1 - beta2)``, which is 3.2 with the default betas.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled: Decay the weights themselves (AdamW) instead of adding the decay to the gradient (Adam).

    Raises:
        ValueError: An argument is out of range.
    """

    step_rule: ClassVar[StepRule] = UncorrectedAdamRule(decoupled=False)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0) or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"UncorrectedAdam: out of range: lr {lr}, betas {betas}, eps {eps} or weight_decay "
                f"{weight_decay}"
            )
        entries = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**entries, "decoupled_weight_decay": decoupled, "bias_correction": False})

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
                    own["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    own["exp_avg"] = torch.zeros_like(parameter)
                    own["exp_avg_sq"] = torch.zeros_like(parameter)
                own["step"] += 1
                if parameter.dtype == torch.float32:
                    # Kernels take flat tensors. The views share the memory of the state.
                    flat = {**own, **{name: own[name].view(-1) for name in ("exp_avg", "exp_avg_sq")}}
                    leaf = parameter.detach().view(-1)
                    grad = parameter.grad.reshape(-1)
                    self.step_rule.run(leaf, grad, None, flat, args)
                else:
                    _step_wide(parameter, own, args)
        return result


def _step_wide(parameter: Tensor, own: Mapping[str, Tensor], args: AdamArgs) -> None:
    """Step a parameter whose dtype the kernel does not support by torch's operations."""
    first = own["exp_avg"]
    second = own["exp_avg_sq"]
    grad = parameter.grad
    assert grad is not None
    # AdamW decays the weights; Adam adds the decay to the gradient, so that the moments have it.
    if args.decoupled:
        parameter.mul_(1 - args.lr * args.weight_decay)
    else:
        grad = grad.add(parameter, alpha=args.weight_decay)
    first.lerp_(grad, 1 - args.beta1)
    second.mul_(args.beta2).addcmul_(grad, grad, value=1 - args.beta2)
    correction1, correction2 = args.corrections(float(own["step"]))
    parameter.sub_(args.lr / correction1 * first / ((second / correction2).sqrt() + args.eps))
