"""The gradient's norm, and what follows from it for a step, without the host.

Note [Squares out of range]. fp32 has values from 1e-45 to 3e38, and squares only of those from about 1e-19 to
1e19. Squares in float64 would have all, at three times the time on a CPU, and 1/64 of the speed on many GPUs.
So squares are summed in fp32, a few elements at a time, which is right for almost all: a sum that is far from
both ends has lost nothing that counts. One that is not (also 0, inf and NaN) is taken again of the same
elements times a power of two, which is exact, and divided by its square in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import loader
from .arguments import FLOATS, Scalar, check_device, check_flat, check_scalar
from .twins import as_tensor

_PARTIALS = 1024
_CHUNK = 1 << 20
_ROW = 1 << 12
_FEW = 1 << 5
"""Rows that are multiplied at a time: they stay in the cache."""
_LOW = 2.0**-40
_HIGH = 2.0**60
_SCALE = 2.0**-75
"""Bound the norms of rows whose squares are in range, and scale those above; see norm.cu for its bounds."""
_ENOUGH = 2.0**-50
"""Is the sum of squares for each row from which a tensor's sum is right: a row that is out of range has less
than ``_LOW`` squared, 2**-80, and one that is too large makes the sum infinite.
"""


@torch.no_grad()
def sums_of_squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sum the squares of each of some flat fp32, bf16 or fp16 tensors of one device: 0-dim float64 there.

    The same bits in every run, and whatever the other tensors are: products in fp32, sums of blocks in an
    order that the length alone decides. Not finite if, and only if, any element is not: see Note [Squares out
    of range]. Reads each element once (2 or 4 bytes), two launches for all tensors of a dtype. Raises
    ValueError for another dtype or shape, or several devices.
    """
    for tensor in tensors:
        check_flat("tensor", tensor, FLOATS)
        check_device("tensor", tensor, tensors[0])
    if not tensors or not loader.use_kernels(tensors[0]):
        return list(map(_sum_by_torch, tensors))
    sums: list[Tensor] = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        found = _launch([tensors[i] for i in chosen])
        for i, total in zip(chosen, found.unbind(), strict=True):
            sums[i] = total
    return sums


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum the squares of one tensor, as :func:`sums_of_squares` does."""
    return sums_of_squares([tensor])[0]


def _sum_by_torch(tensor: Tensor) -> Tensor:
    """Sum by rows: torch adds up a long fp32 tensor so plainly that the norm of 64M elements can be 1%
    off.
    """
    whole = tensor.numel() // _ROW * _ROW
    parts = [rows for rows in (tensor[:whole].view(-1, _ROW), tensor[whole:].view(1, -1)) if rows.numel()]
    if not parts:
        return tensor.double().sum()
    if tensor.device.type == "cpu":
        total = torch.stack([_norms_in_range(rows).double().square().sum() for rows in parts]).sum()
        # what rows of small norms have lost counts for nothing in such a sum
        if _ENOUGH * (whole // _ROW + 1) < float(total) < math.inf:
            return total
    return torch.cat([_norms_of(rows) for rows in parts]).square().sum()


def _norms_of(rows: Tensor) -> Tensor:
    """Return the norm of each row, in float64."""
    norms = _norms_in_range(rows).double()
    if rows.device.type != "cpu":  # the host must not wait for a decision: all again
        for some in torch.arange(len(rows), device=rows.device).split(_CHUNK // _ROW):  # type: ignore[no-untyped-call]
            own = norms[some]
            again = _norms_out_of_range(rows[some], own)
            norms[some] = own.where((own > _LOW) & (own < _HIGH), again)
        return norms
    low, high = torch.aminmax(norms)
    if not (low > _LOW and high < _HIGH):
        out = ((norms > _LOW) & (norms < _HIGH)).logical_not_().nonzero().view(-1)
        for some in out.split(_FEW):  # type: ignore[no-untyped-call]
            norms[some] = _norms_out_of_range(rows[some], norms[some])
    return norms


def _norms_in_range(rows: Tensor) -> Tensor:
    """Return the norm of each row as fp32 gives it."""
    if rows.dtype == torch.float32:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    parts = rows.split(_CHUNK // _ROW)  # type: ignore[no-untyped-call]
    wide = torch.empty_like(parts[0], dtype=torch.float32)
    return torch.cat([torch.linalg.vector_norm(wide[: len(part)].copy_(part), dim=1) for part in parts])


def _norms_out_of_range(rows: Tensor, norms: Tensor) -> Tensor:
    """Return the norms of rows whose ``norms``, as fp32 gives them, are too small or too large for it."""
    scales = torch.full_like(norms, _SCALE).masked_fill_(norms < 1, 1 / _SCALE)
    found: Tensor = torch.linalg.vector_norm(rows.float() * scales.float().unsqueeze(1), dim=1)
    return found.double() / scales


def _launch(tensors: Sequence[Tensor]) -> Tensor:
    """Sum by kernels: flat float64, an element for each of the tensors, which have one dtype."""
    device = tensors[0].device
    dtype = tensors[0].dtype
    counts = [min(_PARTIALS, loader.blocks_for(-(-tensor.numel() // 16))) for tensor in tensors]
    blocks = sum(counts)
    sums = torch.empty(blocks, dtype=torch.float64, device=device)
    result = torch.empty(len(tensors), dtype=torch.float64, device=device)
    table = _table(tensors, counts) if len(tensors) > 1 else None
    options: dict[str, Any] = {"device": device, "defines": (loader.define("SRC", dtype),)}
    first = tensors[0]
    loader.launch(
        "norm", "square_sums", table, len(tensors), first, first.numel(), sums, blocks=blocks, **options
    )
    loader.launch("norm", "totals", table, blocks, sums, result, blocks=len(tensors), **options)
    return result


def _table(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Make the table that norm.cu reads, on the device; the host does not wait for it."""
    starts = itertools.accumulate(counts, initial=0)
    ends: list[tuple[int, int]] = [*((t.data_ptr(), t.numel()) for t in tensors), (0, 0)]
    rows = [number for end, start in zip(ends, starts, strict=True) for number in (*end, start)]
    table = torch.tensor(rows, dtype=torch.int64)
    device = tensors[0].device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@torch.no_grad()
def prepare_step(sum_squares: Tensor, *, divisor: Scalar, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(norm, multiplier, found_inf)`` of a step, 0-dim float32 tensors on the device of
    ``sum_squares``.

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
