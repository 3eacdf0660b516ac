"""The optimizer steps in plain torch: where there are no kernels, and what the kernels must equal.

Arguments and meaning are those of the functions in ``step``. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .arguments import AdamArgs, LionArgs, Scalar, SgdArgs


def as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """Return a 0-dim float32 tensor on the device of ``like``."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float32, device=like.device)


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs,
) -> None:
    """Step by torch's fused Adam or AdamW on ``grad * args.multiplier``, with the casts around it."""
    flag = None if args.found_inf is None else (as_tensor(args.found_inf, master) != 0).float()
    wide = grad.to(torch.float32, copy=True).mul_(args.multiplier)
    fused_adam(master, exp_avg, exp_avg_sq, wide, step, args, found_inf=flag)
    _cast(out, master, flag)


def fused_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    step: Scalar,
    args: AdamArgs,
    *,
    divisor: float = 1.0,
    found_inf: Tensor | None = None,
) -> None:
    """Run torch's operation on ``gradient / divisor``, fp32 all; it leaves that quotient in ``gradient``.

    Of ``args`` the multiplier and found_inf are not used.
    """
    fused: Any = torch._fused_adamw_ if args.decoupled else torch._fused_adam_
    fused(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [as_tensor(step if args.corrected else math.inf, master)],  # beta**inf is 0: nothing is corrected
        lr=args.lr,
        beta1=args.beta1,
        beta2=args.beta2,
        eps=args.eps,
        weight_decay=args.weight_decay,
        amsgrad=False,
        maximize=False,
        grad_scale=None if divisor == 1 else as_tensor(divisor, master),
        found_inf=found_inf,
    )


def sgd(
    master: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: SgdArgs,
) -> None:
    """Step by the formula of torch.optim.SGD."""
    update = (grad.float() * args.multiplier).add_(master, alpha=args.weight_decay)
    if momentum_buffer is not None:
        later = (momentum_buffer * args.momentum).add_(update, alpha=1 - args.dampening)
        buffer = torch.where(as_tensor(step, master) == 1, update, later)
        update = update + args.momentum * buffer if args.nesterov else buffer
        _write(momentum_buffer, buffer, args.found_inf)
    _write(master, master - args.lr * update, args.found_inf)
    _cast(out, master, args.found_inf)


def lion(master: Tensor, exp_avg: Tensor, grad: Tensor, out: Tensor | None, args: LionArgs) -> None:
    """Step by Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023)."""
    gradient = grad.float() * args.multiplier
    update = torch.lerp(exp_avg, gradient, 1 - args.beta1).sign_().add_(master, alpha=args.weight_decay)
    _write(master, master - args.lr * update, args.found_inf)
    _write(exp_avg, torch.lerp(exp_avg, gradient, 1 - args.beta2), args.found_inf)
    _cast(out, master, args.found_inf)


def _write(target: Tensor, value: Tensor, found_inf: Scalar | None) -> None:
    """Copy ``value`` into ``target``, unless ``found_inf``."""
    if found_inf is not None:
        value = torch.where(as_tensor(found_inf, target) != 0, target, value)
    target.copy_(value)


def _cast(out: Tensor | None, master: Tensor, found_inf: Scalar | None) -> None:
    if out is not None and found_inf is None:
        out.copy_(master)
    elif out is not None:
        _write(out, master.to(out.dtype), found_inf)
