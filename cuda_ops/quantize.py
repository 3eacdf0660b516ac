"""Block quantisation for communication: fp32, bf16 and fp16 as codes of 8 or 4 bits with a scale a block.

This is what ZeRO++ (arXiv 2306.10209) sends in place of parameters (qwZ) and gradients (qgZ), with the error
feedback of LoCo (arXiv 2407.04480). A packed buffer of n elements has n * bits / 8 bytes of codes, then
n / block scales in fp32. Codes of 4 bits are two in a byte, the low half first. A buffer of rows, one for
each rank that they go to or come from, is filled or read by one launch. On CUDA devices kernels of
``kernels/quantize.cu``, on the CPU numba's where there is numba, else the twins in plain torch: all give the
same bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import loader, quantize_host, quantize_twins
from .arguments import FLOATS, check_flat, check_packed, check_range, check_rows

BLOCK = 256
"""Elements that share a scale, if nothing else is said."""
WIDE = (*FLOATS, torch.float64)
_GROUP = 8
"""Elements that a thread of a kernel takes at a time."""
_LANES = 32
"""Threads that work on a block together. Blocks are multiples of it: then all parts are whole words."""
_SCALE_BYTES = 4


def packed_bytes(numel: int, *, bits: int, block: int = BLOCK) -> int:
    """Return the bytes of a packed buffer: ``numel * bits / 8`` of codes, 4 for each block's scale.

    Raises ValueError if ``bits`` is neither 8 nor 4, ``block`` no positive multiple of 32, or ``numel`` no
    multiple of ``block``.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, expected 8 or 4")
    if block <= 0 or block % _LANES:
        raise ValueError(f"block is {block}, expected a positive multiple of {_LANES}")
    if numel < 0 or numel % block:
        raise ValueError(f"numel is {numel}, expected a multiple of block, {block}")
    return numel * bits // 8 + numel // block * _SCALE_BYTES


@torch.no_grad()
def quantize(values: Tensor, packed: Tensor, *, bits: int, block: int = BLOCK) -> None:
    """Quantise blocks of ``values`` into ``packed``.

    ``values``: flat, n elements of fp32, bf16, fp16 or float64. ``packed``: uint8 on the same device, at an
    address that is a multiple of 4, flat, of ``packed_bytes(n)`` elements; or of shape (rows,
    ``packed_bytes(n / rows)``), without gaps, where each row takes as many values, one row after the other.

    In fp32 (float64 for float64): scale = max(largest absolute value / m, 2^-126), rounded to fp32, with m =
    127 for 8 bits and 7 for 4; code = value * (1 / scale), rounded to the nearest, ties to even, between -m
    and m. A block of zeros has scale 0. A block with an inf or a NaN, or whose scale leaves fp32, has scale
    NaN and codes 0: all of it comes back as NaN, so that whoever looks for an overflow finds it. What comes
    back of others is off by half a scale at most, and by what fp32 rounds. The formula is that of symmetric
    block quantisation in ZeRO++, section 3.1.

    Bytes an element of 16 bits: 2 + bits / 8, and 4 for a block's scale. float64 runs in plain torch on all
    devices. Raises ValueError for wrong dtypes, shapes, devices, ``bits`` or ``block``.
    """
    _check(values, None, packed, bits, block)
    _quantize(values, None, packed, bits, block, 0.0)


@torch.no_grad()
def quantize_with_error(
    values: Tensor, error: Tensor, packed: Tensor, *, bits: int, block: int = BLOCK, beta: float
) -> None:
    """Quantise ``values + error`` into ``packed``, and update ``error``, a mean of what earlier calls lost.

    ``error``: flat like ``values``, fp32 or their dtype, zeros at first; everything else is as in
    :func:`quantize`. With whole = values + error and lost = whole - what ``packed`` stands for::

        error = beta * error + (1 - beta) * lost

    each operation rounded to fp32, then to the dtype of ``error``. The moving average is that of LoCo; as in
    DeepSpeed, ``beta`` (``err_beta``, 0.8 there) is the part that is kept of the old error. From an error of
    0 on, the sum of what was sent lacks error / (1 - beta) of the sum of ``values``, however many calls there
    were, and what is rounded. In a block that is not finite ``error`` stays as it is. It is in the units of
    ``values``: where a loss scale changes, the caller has to multiply it along.

    Raises ValueError also for a ``beta`` outside of 0 <= beta < 1.
    """
    _check(values, error, packed, bits, block)
    check_range("beta", beta, 0.0, 1.0)
    _quantize(values, error, packed, bits, block, float(beta))


@torch.no_grad()
def dequantize(packed: Tensor, out: Tensor, *, bits: int, block: int = BLOCK) -> None:
    """Write code * scale, in fp32 (float64 if ``out`` is), for all elements of ``packed`` into ``out``.

    ``packed``: as :func:`quantize` fills it, in one row or in several. ``out``: flat, n elements of fp32,
    bf16, fp16 or float64, rounded to the nearest. Raises ValueError for wrong dtypes, shapes, devices,
    ``bits`` or ``block``.
    """
    _check(out, None, packed, bits, block, name="out")
    rows = packed if packed.dim() == 2 else packed.unsqueeze(0)
    s = out.numel() // len(rows)
    if _for_kernels(out):
        _launch_dequantize(rows, 1, out, s, bits, block)
        return
    for i, row in enumerate(rows):
        _dequantize_on_host(row.unsqueeze(0), out[i * s : (i + 1) * s], bits, block)


@torch.no_grad()
def dequantize_sum(packed_rows: Tensor, out: Tensor, *, bits: int, block: int = BLOCK) -> None:
    """Write the sum of what the rows of ``packed_rows`` stand for into ``out``.

    ``packed_rows``: uint8 of shape (rows, ``packed_bytes(n)``), without gaps, one row or more, each as
    :func:`quantize` fills it. ``out``: as in :func:`dequantize`. Added in the order of the rows in fp32
    (float64 if ``out`` is), then rounded once. Raises ValueError for wrong dtypes, shapes, devices, ``bits``
    or ``block``.
    """
    check_rows("packed_rows", packed_rows)
    _check(out, None, packed_rows[0], bits, block, name="out", packed_name="packed_rows")
    if _for_kernels(out):
        _launch_dequantize(packed_rows, len(packed_rows), out, out.numel(), bits, block)
    else:
        _dequantize_on_host(packed_rows, out, bits, block)


def _check(
    values: Tensor,
    error: Tensor | None,
    packed: Tensor,
    bits: int,
    block: int,
    *,
    name: str = "values",
    packed_name: str = "packed",
) -> None:
    check_flat(name, values, WIDE)
    if error is not None:
        check_flat("error", error, tuple(dict.fromkeys((torch.float32, values.dtype))), values)
    check_packed(packed_name, packed, values, name, partial(packed_bytes, bits=bits, block=block))
    if packed.storage_offset() % _SCALE_BYTES or packed.data_ptr() % _SCALE_BYTES:
        raise ValueError(f"{packed_name} must be aligned to {_SCALE_BYTES} bytes")


def _quantize(
    values: Tensor, error: Tensor | None, packed: Tensor, bits: int, block: int, beta: float
) -> None:
    if values.numel() == 0:
        return
    rows = packed if packed.dim() == 2 else packed.unsqueeze(0)
    s = values.numel() // len(rows)
    if _for_kernels(values):
        row = (s // block, rows.shape[1] // _SCALE_BYTES)
        numbers = (*row, values.numel(), block, bits, beta, 1 - beta)
        _launch(
            "quantize", (values, error, packed, *numbers), values, error, values.numel() // block * _LANES
        )
        return
    run = quantize_host.quantize if _on_host(values) else quantize_twins.quantize
    for i, row_of in enumerate(rows):
        part = slice(i * s, (i + 1) * s)
        run(values[part], None if error is None else error[part], row_of, bits, block, beta)


def _dequantize_on_host(packed_rows: Tensor, out: Tensor, bits: int, block: int) -> None:
    if out.numel():
        run = quantize_host.dequantize_sum if _on_host(out) else quantize_twins.dequantize_sum
        run(packed_rows, out, bits, block)


def _launch_dequantize(
    packed_rows: Tensor, added: int, out: Tensor, part_numel: int, bits: int, block: int
) -> None:
    """Launch the kernel for parts of ``part_numel`` elements, each the sum of ``added`` rows."""
    if out.numel():
        numbers = (added, packed_rows.shape[1] // _SCALE_BYTES, part_numel // block)
        arguments = (packed_rows, *numbers, out, out.numel(), block, bits)
        _launch("dequantize", arguments, out, None, out.numel() // _GROUP)


def _for_kernels(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float64 and loader.use_kernels(tensor)


def _on_host(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float64 and quantize_host.wanted(tensor)


def _launch(
    kernel: str,
    arguments: tuple[Tensor | float | None, ...],
    values: Tensor,
    error: Tensor | None,
    threads: int,
) -> None:
    """Launch a kernel of ``quantize.cu`` for the storage types of ``values`` and ``error``."""
    loader.launch(
        "quantize",
        kernel,
        *arguments,
        device=values.device,
        blocks=loader.blocks_for(threads),
        defines=(
            loader.define("VALUES", values.dtype),
            loader.define("ERROR", None if error is None else error.dtype),
        ),
    )
