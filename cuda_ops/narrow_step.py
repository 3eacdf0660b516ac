"""One optimizer step over a flat shard whose states, or whose master values, have fewer than 32 bits.

In a single pass, as in ``step``: widen to fp32, update, narrow. Codes of 8 bits are rounded to the nearest
(``narrow_state``), bf16 up or down at random with the right mean: the nearest bf16 of a moment that moves by
a thousandth is the moment itself. The random bits are a hash of (key, step, element): equal on a GPU and on a
CPU, for any number of ranks, in tiles of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import host, loader, narrow_host, narrow_twins
from .arguments import (
    FLOATS,
    HALVES,
    AdamArgs,
    LionArgs,
    Scalar,
    SgdArgs,
    check_device,
    check_flat,
    check_scalar,
)
from .narrow_state import BLOCK, tables
from .narrow_twins import States

NAMES = {AdamArgs: "adam", SgdArgs: "sgd", LionArgs: "lion"}
_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@torch.no_grad()
def narrow_step(
    master: Tensor,
    states: States,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs | SgdArgs | LionArgs,
    *,
    key: int = 0,
    place: int = 0,
) -> None:
    """Step Adam, SGD or Lion, as ``args`` say, on ``grad * args.multiplier``; formulas as in ``step``.

    ``master``: flat fp32 or bf16 of n elements. ``states``: the first moment or momentum buffer, and the
    second moment; flat, of n elements of fp32, bf16 or uint8 (codes), all alike, with the fp32 scales of
    their blocks, (blocks, 1), for codes. ``grad``: n elements of fp32, bf16 or fp16, left as it is.
    ``out``: None, or n elements of bf16 or fp16 that get the cast of the new master. ``step``: the count with
    this step in it. ``key`` and ``place`` tell the random bits of the first element: they are to differ
    between tensors, and between a tensor's parts by their elements.

    Bytes a parameter, codes, bf16 masters and gradients: 2 + 2 * (2 + 1 + 1) = 10. Raises ValueError for
    wrong dtypes, shapes or devices.
    """
    _check(master, states, grad, out, step, args)
    if loader.use_kernels(master):
        _launch(master, states, grad, out, step, args, key, place)
        return
    run = narrow_host.step if host.wanted(master) else narrow_twins.step
    run(master, states, grad, out, step, args, key, place)


def _check(
    master: Tensor,
    states: States,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs | SgdArgs | LionArgs,
) -> None:
    check_flat("master", master, (torch.float32, torch.bfloat16))
    check_flat("grad", grad, FLOATS, master)
    if out is not None:
        check_flat("out", out, HALVES, master)
    wanted = 2 if isinstance(args, AdamArgs) else int(not isinstance(args, SgdArgs) or args.momentum != 0)
    if len(states) != wanted:
        raise ValueError(f"got {len(states)} states, expected {wanted}")
    for number, (kept, scale) in enumerate(states, 1):
        check_flat(f"state {number}", kept, _DTYPES, master)
        if kept.dtype != states[0][0].dtype:
            raise ValueError(f"state {number} is {kept.dtype}, expected {states[0][0].dtype} as the first")
        if kept.dtype == torch.uint8:
            blocks = -(-kept.numel() // BLOCK)
            if scale is None or scale.dtype != torch.float32 or scale.shape != (blocks, 1):
                raise ValueError(f"state {number} needs fp32 scales of shape [{blocks}, 1]")
            check_device(f"the scales of state {number}", scale, master)
    for name, value in (("step", step), ("lr", args.lr), ("multiplier", args.multiplier)):
        check_scalar(name, value, master)
    if args.found_inf is not None:
        check_scalar("found_inf", args.found_inf, master)


def _launch(
    master: Tensor,
    states: States,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs | SgdArgs | LionArgs,
    key: int,
    place: int,
) -> None:
    if grad.numel() == 0:
        return
    kind = states[0][0].dtype if states else torch.float32
    codes = kind == torch.uint8
    flat = [tensor for kept, scale in states for tensor in (kept, scale if codes else None)]
    flat = flat or [None, None]
    scalars = (step, args.lr, args.multiplier, 0.0 if args.found_inf is None else args.found_inf)
    loader.launch(
        "narrow",
        f"narrow_{NAMES[type(args)]}",
        master,
        *flat,
        grad,
        out,
        grad.numel(),
        tables(grad.device) if codes else None,
        key,
        place,
        *(part for value in scalars for part in loader.scalar(value)),
        *args.coefficients(),
        device=grad.device,
        blocks=loader.blocks_for(-(-grad.numel() // _GROUP)),
        defines=(
            loader.define("MASTER", master.dtype),
            loader.define("STATE", kind),
            loader.define("GRAD", grad.dtype),
            loader.define("OUT", None if out is None else out.dtype),
        ),
    )


_GROUP = 8
"""Elements that a thread takes at a time."""
