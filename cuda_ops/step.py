"""One optimizer step over a flat shard: unscale, clip, update and cast in a single pass.

On CUDA devices a kernel of ``kernels/step.cu``, on the CPU ``host``, else the twin in plain torch. The
scalars ``step``, ``lr``, ``multiplier`` and ``found_inf`` may be 0-dim float32 tensors on the shard's
device: a kernel reads them there, so the host never waits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import host, loader, twins
from .arguments import (
    FLOATS,
    HALVES,
    AdamArgs,
    LionArgs,
    Scalar,
    SgdArgs,
    StepArgs,
    check_flat,
    check_range,
    check_scalar,
)


@torch.no_grad()
def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs,
) -> None:
    """Step Adam, or AdamW if ``args.decoupled``, on ``grad * args.multiplier``: the formulas of torch.optim.

    ``master``, ``exp_avg``, ``exp_avg_sq``: flat fp32 of n elements, updated in place. ``grad``: n elements
    of fp32, bf16 or fp16. ``out``: None, or n elements of bf16 or fp16 that get the cast of the new master.
    ``step``: the count with this step in it, 1 at the first.

    Bytes a parameter, 16 bit in and out: 2 (grad) + 12 + 12 (state, read and written) + 2 (out) = 28.
    ``grad`` is left as it is, with one exception: on the CPU, in fp32 and without ``out``, this is torch's
    fused operation with ``grad_scale``, which leaves the unscaled gradient behind. Raises ValueError for
    wrong dtypes, shapes or devices.
    """
    _check(master, grad, out, args, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    check_scalar("step", step, master)
    if not isinstance(step, Tensor):
        check_range("step", step, 1.0, math.inf)
    if loader.use_kernels(master):
        _launch(
            "adam",
            (master, exp_avg, exp_avg_sq, grad, out),
            (step, args.lr, args.multiplier, args.found_inf),
            args.coefficients(),
        )
        return
    run = host.adam if host.wanted(master) else twins.adam
    run(master, exp_avg, exp_avg_sq, grad, out, step, args)


@torch.no_grad()
def sgd_step(
    master: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: SgdArgs,
) -> None:
    """Step torch.optim.SGD on ``grad * args.multiplier``; tensors and errors as in :func:`adam_step`.

    ``momentum_buffer``: flat fp32 like ``master``, or None if ``momentum`` is 0. At step 1 it becomes the
    gradient, whatever it held. Bytes a parameter, 16 bit in and out: 2 + 8 + 8 + 2 = 20, 12 without momentum.
    """
    _check(master, grad, out, args, momentum_buffer=momentum_buffer)
    check_scalar("step", step, master)
    momentum = args.momentum
    if (momentum_buffer is None) != (momentum == 0):
        raise ValueError(
            f"momentum_buffer is {'missing' if momentum else 'given'}, but momentum is {momentum}"
        )
    if loader.use_kernels(master):
        _launch(
            "sgd",
            (master, momentum_buffer, grad, out),
            (step, args.lr, args.multiplier, args.found_inf),
            args.coefficients(),
        )
        return
    run = host.sgd if host.wanted(master) else twins.sgd
    run(master, momentum_buffer, grad, out, step, args)


@torch.no_grad()
def lion_step(master: Tensor, exp_avg: Tensor, grad: Tensor, out: Tensor | None, args: LionArgs) -> None:
    """Step Lion on ``grad * args.multiplier``; tensors and errors as in :func:`adam_step`.

    The formula is Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023), weight
    decay decoupled. Bytes a parameter, 16 bit in and out: 2 + 8 + 8 + 2 = 20.
    """
    _check(master, grad, out, args, exp_avg=exp_avg)
    if loader.use_kernels(master):
        _launch(
            "lion",
            (master, exp_avg, grad, out),
            (args.lr, args.multiplier, args.found_inf),
            args.coefficients(),
        )
        return
    run = host.lion if host.wanted(master) else twins.lion
    run(master, exp_avg, grad, out, args)


def _check(master: Tensor, grad: Tensor, out: Tensor | None, args: StepArgs, **state: Tensor | None) -> None:
    check_flat("master", master, (torch.float32,))
    for name, tensor in state.items():
        if tensor is not None:
            check_flat(name, tensor, (torch.float32,), master)
    check_flat("grad", grad, FLOATS, master)
    if out is not None:
        check_flat("out", out, HALVES, master)
    check_scalar("lr", args.lr, master)
    check_scalar("multiplier", args.multiplier, master)
    if args.found_inf is not None:
        check_scalar("found_inf", args.found_inf, master)


def _launch(
    kernel: str,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Scalar | None, ...],
    coefficients: tuple[float, ...],
) -> None:
    """Launch a kernel of ``step.cu``: ``tensors`` end with grad and out; a found_inf of None is 0."""
    *_, grad, out = tensors
    assert grad is not None
    if grad.numel() == 0:
        return
    flat = [part for value in scalars for part in loader.scalar(0.0 if value is None else value)]
    loader.launch(
        "step",
        kernel,
        *tensors,
        grad.numel(),
        *flat,
        *coefficients,
        device=grad.device,
        blocks=loader.vector_blocks(grad),
        defines=(loader.define("GRAD", grad.dtype), loader.define("OUT", None if out is None else out.dtype)),
    )
