"""The optimizer steps in plain torch: where there are no kernels, and what the kernels must equal.

Arguments and meaning are those of the functions in ``step``. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Scalar


def as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """A 0-dim float32 tensor on the device of ``like``."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float32, device=like.device)


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    *,
    step: Scalar,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    multiplier: Scalar,
    found_inf: Scalar | None,
) -> None:
    """torch's fused Adam or AdamW on ``grad * multiplier``, and the casts around it."""
    flag = None if found_inf is None else (as_tensor(found_inf, master) != 0).float()
    fused_adam(
        master,
        exp_avg,
        exp_avg_sq,
        grad.to(torch.float32, copy=True).mul_(multiplier),
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        found_inf=flag,
    )
    _cast(out, master, flag)


def fused_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    *,
    step: Scalar,
    decoupled: bool,
    divisor: float = 1.0,
    found_inf: Tensor | None = None,
    **coefficients: Any,
) -> None:
    """torch's operation on ``gradient / divisor``, fp32 all; it leaves that quotient in ``gradient``."""
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    fused(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [as_tensor(step, master)],
        amsgrad=False,
        maximize=False,
        grad_scale=None if divisor == 1 else as_tensor(divisor, master),
        found_inf=found_inf,
        **coefficients,
    )


def sgd(
    master: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    out: Tensor | None,
    *,
    step: Scalar,
    lr: Scalar,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    multiplier: Scalar,
    found_inf: Scalar | None,
) -> None:
    """The formula of torch.optim.SGD."""
    update = (grad.float() * multiplier).add_(master, alpha=weight_decay)
    if momentum_buffer is not None:
        later = (momentum_buffer * momentum).add_(update, alpha=1 - dampening)
        buffer = torch.where(as_tensor(step, master) == 1, update, later)
        update = update + momentum * buffer if nesterov else buffer
        _write(momentum_buffer, buffer, found_inf)
    _write(master, master - lr * update, found_inf)
    _cast(out, master, found_inf)


def lion(
    master: Tensor,
    exp_avg: Tensor,
    grad: Tensor,
    out: Tensor | None,
    *,
    lr: Scalar,
    beta1: float,
    beta2: float,
    weight_decay: float,
    multiplier: Scalar,
    found_inf: Scalar | None,
) -> None:
    """Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023)."""
    gradient = grad.float() * multiplier
    update = torch.lerp(exp_avg, gradient, 1 - beta1).sign_().add_(master, alpha=weight_decay)
    _write(master, master - lr * update, found_inf)
    _write(exp_avg, torch.lerp(exp_avg, gradient, 1 - beta2), found_inf)
    _cast(out, master, found_inf)


def _write(target: Tensor, value: Tensor, found_inf: Scalar | None) -> None:
    """``value`` into ``target``, unless ``found_inf``."""
    if found_inf is not None:
        value = torch.where(as_tensor(found_inf, target) != 0, target, value)
    target.copy_(value)


def _cast(out: Tensor | None, master: Tensor, found_inf: Scalar | None) -> None:
    if out is not None and found_inf is None:
        out.copy_(master)
    elif out is not None:
        _write(out, master.to(out.dtype), found_inf)
