"""Compression of fp32 to signs: one bit an element and a scale for each block of 256 elements.

This is what 1-bit Adam (Tang et al., 2021, arXiv 2102.02888) sends, with the error that the next call takes
up. A packed buffer of n elements has n / 8 bytes of bits, the first element of eight in the lowest, then n /
256 scales in fp32. A buffer of rows, one for each rank that they go to or come from, is filled or read by one
launch. On CUDA devices kernels of ``kernels/signs.cu``, on the CPU numba's where there is numba, else the
twins in plain torch: all give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import host, loader, signs_host, signs_twins
from .arguments import check_device, check_flat, check_packed, check_rows

BLOCK = 256
"""Elements that share a scale."""
_LANES = 32
"""Threads of a kernel that work on a block together."""
_GROUP = 8
_FLOATS = (torch.float32, torch.float64)


def packed_bytes(numel: int) -> int:
    """Return the bytes of a packed buffer. Raises ValueError if ``numel`` is no multiple of 256."""
    if numel < 0 or numel % BLOCK:
        raise ValueError(f"numel is {numel}, expected a multiple of {BLOCK}")
    return numel // 8 + numel // BLOCK * 4


@torch.no_grad()
def compress(values: Tensor, packed: Tensor, *, addend: Tensor | None = None, alpha: float = 1.0) -> None:
    """Pack the signs of ``values``, and leave in them what that loses: their difference to what comes back.

    ``values``: flat, n elements of fp32, or of float64, which runs in plain torch. ``packed``: uint8 on
    the same device, at an address that is a multiple of 4, flat, of ``packed_bytes(n)`` elements; or of shape
    (rows, ``packed_bytes(n / rows)``), without gaps, where each row takes as many values, one row after the
    other. ``addend``: flat, n elements, of which ``alpha`` times is added to ``values`` first.

    A block's scale is the root of its mean square, so that signs have the length of the values (arXiv
    2102.02888, section 4.1): with y = value * (1 / largest), largest * sqrt(sum(y * y) / 256) in fp32
    (float64), rounded to fp32. 0 counts as positive. A block with an inf or a NaN has scale NaN, and its
    values stay as they are.

    Bytes an element: 8 read and written, and 1 / 8. Raises ValueError for wrong dtypes, shapes or devices.
    """
    _check("values", values, packed)
    _check_sum("addend", addend, values)
    if values.numel() == 0:
        return
    rows = packed if packed.dim() == 2 else packed.unsqueeze(0)
    s = values.numel() // len(rows)
    if _on_host(values):
        for i, row in enumerate(rows):
            part = slice(i * s, (i + 1) * s)
            signs_host.compress(values[part], row, None if addend is None else addend[part], alpha)
        return
    if addend is not None:
        values.add_(addend, alpha=alpha)
    if _for_kernels(values):
        blocks = loader.blocks_for(values.numel() // BLOCK * _LANES)
        given = (values, packed, s // BLOCK, rows.shape[1], values.numel())
        loader.launch("signs", "compress", *given, device=values.device, blocks=blocks)
        return
    for i, row in enumerate(rows):
        signs_twins.compress(values[i * s : (i + 1) * s], row)


@torch.no_grad()
def expand(packed: Tensor, out: Tensor, *, into: Tensor | None = None, alpha: float = 1.0) -> None:
    """Write what ``packed`` stands for into ``out``.

    ``packed``: as :func:`compress` fills it, in one row or in several. ``out``: flat, n elements of fp32 or
    float64. ``into``: flat, n elements, to which ``alpha`` times the result is added. Raises ValueError for
    wrong dtypes, shapes or devices.
    """
    _check("out", out, packed)
    _check_sum("into", into, out)
    rows = packed if packed.dim() == 2 else packed.unsqueeze(0)
    s = out.numel() // len(rows)
    if _for_kernels(out):
        _launch_expand(rows, 1, out, s, 1.0)
        if into is not None:
            into.add_(out, alpha=alpha)
        return
    for i, row in enumerate(rows):
        part = slice(i * s, (i + 1) * s)
        _expand_on_host(row.unsqueeze(0), out[part], 1.0, None if into is None else into[part], alpha)


@torch.no_grad()
def expand_sum(packed_rows: Tensor, out: Tensor, *, factor: float = 1.0) -> None:
    """Write ``factor`` times the sum of what the rows of ``packed_rows`` stand for into ``out``.

    ``packed_rows``: uint8 of shape (rows, ``packed_bytes(n)``), without gaps, each row as :func:`compress`
    fills it. ``out``: flat, n elements of fp32 or float64. Added in the order of the rows, in the dtype of
    ``out``. Raises ValueError for wrong dtypes, shapes or devices.
    """
    check_rows("packed_rows", packed_rows)
    _check("out", out, packed_rows[0])
    if _for_kernels(out):
        _launch_expand(packed_rows, len(packed_rows), out, out.numel(), float(factor))
    else:
        _expand_on_host(packed_rows, out, float(factor), None, 0.0)


def _launch_expand(packed_rows: Tensor, added: int, out: Tensor, part_numel: int, factor: float) -> None:
    """Launch the kernel for parts of ``part_numel`` elements, each the sum of ``added`` rows."""
    if out.numel():
        blocks = loader.blocks_for(out.numel() // _GROUP)
        numbers = (added, packed_rows.shape[1], part_numel // BLOCK)
        given = (packed_rows, *numbers, out, out.numel(), factor)
        loader.launch("signs", "expand", *given, device=out.device, blocks=blocks)


def _expand_on_host(
    packed_rows: Tensor, out: Tensor, factor: float, into: Tensor | None, alpha: float
) -> None:
    if not out.numel():
        return
    if _on_host(out):
        signs_host.expand(packed_rows, out, factor, into, alpha)
        return
    signs_twins.expand(packed_rows, out, factor)
    if into is not None:
        into.add_(out, alpha=alpha)


@torch.no_grad()
def frozen_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    weight_decay: float,
    eps: float,
) -> bool:
    """Step Adam with a variance that stays as it is, in one pass over memory where numba can; tell whether it
    has: nothing has happened otherwise.

    The tensors are flat, of n elements: m = momentum, 0 where v is 0; w -= lr * (m / (sqrt(v) + eps) +
    weight_decay * w), without bias correction (arXiv 2102.02888, Algorithm 1). fp32 on the CPU only.
    """
    tensors = (master, exp_avg, exp_avg_sq, momentum)
    if not all(_on_host(tensor) and tensor.is_contiguous() for tensor in tensors):
        return False
    signs_host.frozen_adam(*tensors, (lr, weight_decay, eps))
    return True


def _check(name: str, values: Tensor, packed: Tensor) -> None:
    check_flat(name, values, _FLOATS)
    check_packed("packed", packed, values, name, packed_bytes)
    if packed.data_ptr() % 4:
        raise ValueError("packed must be aligned to 4 bytes")


def _check_sum(name: str, other: Tensor | None, values: Tensor) -> None:
    if other is not None:
        check_device(name, other, values)
        if other.shape != values.shape:
            raise ValueError(f"{name} has shape {list(other.shape)}, expected {list(values.shape)}")


def _for_kernels(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float64 and loader.use_kernels(tensor)


def _on_host(tensor: Tensor) -> bool:
    fits = tensor.dtype == torch.float32 and host.wanted(tensor) and not loader.use_kernels(tensor)
    return fits and signs_host.kernels() is not None
