"""The gradient's norm, and what follows from it for a step, without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from . import loader
from .arguments import FLOATS, Scalar, check_flat, check_scalar
from .twins import as_tensor

_PARTIALS = 1024
_CHUNK = 1 << 20
_ROW = 1 << 12


@torch.no_grad()
def sum_of_squares(tensor: Tensor) -> Tensor:
    """The sum of the squares of a flat fp32, bf16 or fp16 tensor: 0-dim float64, on its device.

    The same bits in every run: products in fp32, sums of blocks in a fixed order. Not finite if any element
    is not; a finite one counts as infinite beyond about 1e19, where its square leaves fp32. Reads each
    element once (2 or 4 bytes). Raises ValueError for another dtype or shape.
    """
    check_flat("tensor", tensor, FLOATS)
    if loader.use_kernels(tensor):
        return _launch(tensor)
    if tensor.dtype == torch.float32:
        return _sum_in_rows(tensor)
    parts = tensor.split(_CHUNK)  # type: ignore[no-untyped-call]
    wide = torch.empty(min(_CHUNK, tensor.numel()), dtype=torch.float32, device=tensor.device)
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for part in parts:
        total += _sum_in_rows(wide[: part.numel()].copy_(part))
    return total


def _sum_in_rows(tensor: Tensor) -> Tensor:
    """By rows: torch adds up a long fp32 tensor so plainly that the norm of 64M elements can be 1% off."""
    whole = tensor.numel() // _ROW * _ROW
    norms: Tensor = torch.linalg.vector_norm(tensor[:whole].view(-1, _ROW), dim=1)
    rest: Tensor = torch.linalg.vector_norm(tensor[whole:])
    return norms.double().square().sum() + rest.double().square()


def _launch(tensor: Tensor) -> Tensor:
    numel, device = tensor.numel(), tensor.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if numel:
        # the number of blocks depends on the length alone, and with it the order of the sum
        blocks = min(_PARTIALS, loader.blocks_for(-(-numel // 16)))
        partials = torch.empty(blocks, dtype=torch.float64, device=device)
        defines = (loader.define("SRC", tensor.dtype),)
        loader.launch(
            "norm", "square_sums", tensor, numel, partials, device=device, blocks=blocks, defines=defines
        )
        loader.launch("norm", "total", partials, blocks, total, device=device, blocks=1, defines=defines)
    return total


@torch.no_grad()
def prepare_step(sum_squares: Tensor, *, divisor: Scalar, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(norm, multiplier, found_inf)`` for a step, 0-dim float32 tensors on the device of ``sum_squares``.

    ``sum_squares``: 0-dim float32 or float64, over all ranks. ``divisor``: what the summed gradients have
    to be divided by. ``clip``: the largest norm allowed, 0 for any. norm = sqrt(sum_squares) / divisor;
    multiplier = min(1, clip / (norm + 1e-6)) / divisor, as torch.nn.utils.clip_grad_norm_ has it; found_inf
    = 1 where the norm is not finite, else 0. Raises ValueError for wrong tensors or a negative ``clip``.
    """
    if sum_squares.dim() != 0 or sum_squares.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"sum_squares is {sum_squares.dtype} of shape {list(sum_squares.shape)}, expected a 0-dim "
            "torch.float32 or torch.float64 tensor"
        )
    check_scalar("divisor", divisor, sum_squares)
    if not clip >= 0:
        raise ValueError(f"clip is {clip}, expected 0 (none) or more")
    if loader.use_kernels(sum_squares):
        result = torch.empty(3, dtype=torch.float32, device=sum_squares.device)
        loader.launch(
            "scalars",
            "prepare",
            sum_squares.double(),
            *loader.scalar(divisor),
            float(clip),
            result,
            device=result.device,
            blocks=1,
        )
        norm, multiplier, found_inf = result.unbind()
        return norm, multiplier, found_inf
    whole = as_tensor(divisor, sum_squares)
    norm = (sum_squares.double().sqrt() / whole).float()
    ratio = torch.fmin(clip / (norm + 1e-6), torch.ones_like(norm)) if clip > 0 else torch.ones_like(norm)
    return norm, ratio / whole, (~norm.isfinite()).float()
