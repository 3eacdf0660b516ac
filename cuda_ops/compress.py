"""Fewer bits for communication: one a value, or eight.

Signs as in "1-bit Adam" (Tang et al., 2021), with the mean magnitude as the scale: of all c, c * sign(x) with
c = mean(abs(x)) is nearest to x. Integers are symmetric, with the largest magnitude of a block as 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import loader
from .arguments import FLOATS, check_device, check_flat
from .twins import as_tensor

_F32 = (torch.float32,)
_SUM_SIZE = 1 << 16
"""Elements that one block of threads sums up where all share a scale."""


@torch.no_grad()
def pack_signs(values: Tensor, *, block: int = 0, error: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(signs, scales)`` of flat fp32 ``values``: what :func:`unpack_signs` needs.

    ``signs``: uint8 of ceil(n / 8); bit ``i % 8`` of byte ``i // 8`` is 1 where the value is 0 or more.
    ``scales``: fp32, the mean magnitude of each ``block`` elements (a multiple of 8), or of all if 0.
    ``error``, for error feedback: flat fp32 of n elements, added to the values first; afterwards it holds
    what the signs leave out. Sums of magnitudes are in fp64 and in a fixed order. Bytes a value: 8 read +
    1/8 written, with ``error`` 16 read and 4 more written. Raises ValueError for wrong tensors or blocks.
    """
    check_flat("values", values, _F32)
    if error is not None:
        check_flat("error", error, _F32, values)
    _check_block(block, 8, least=0)
    if loader.use_kernels(values):
        return _pack_on_device(values, block, error)
    corrected = values if error is None else values + error
    numel = values.numel()
    rows = _rows(corrected, block or numel)
    counts = _counts(numel, block or numel, values.device)
    scales = (rows.abs().sum(1, dtype=torch.float64) / counts).float()
    positive = corrected >= 0
    if error is not None:
        error.copy_(corrected - torch.where(positive, 1.0, -1.0) * _spread(scales, block or numel, numel))
    weights = 1 << torch.arange(8, device=values.device)
    return (_rows(positive, 8) * weights).sum(1).to(torch.uint8), scales


@torch.no_grad()
def unpack_signs(signs: Tensor, scales: Tensor, numel: int, *, block: int = 0) -> Tensor:
    """Flat fp32 of ``numel`` elements, each plus or minus its scale; the inverse of :func:`pack_signs`.

    Raises ValueError for wrong tensors or blocks, or if their sizes are not those that pack_signs makes.
    """
    check_flat("signs", signs, (torch.uint8,))
    check_flat("scales", scales, _F32)
    check_device("scales", scales, signs)
    _check_block(block, 8, least=0)
    _check_length("signs", signs, _ceil(numel, 8))
    _check_length("scales", scales, _ceil(numel, block or max(numel, 1)))
    if not loader.use_kernels(signs):
        bits = (signs[:, None] >> torch.arange(8, dtype=torch.uint8, device=signs.device)) & 1
        spread = _spread(scales, block or numel, numel)
        return torch.where(bits.reshape(-1)[:numel] != 0, spread, -spread)
    values = torch.empty(numel, dtype=torch.float32, device=signs.device)
    if numel:
        blocks = loader.blocks_for(signs.numel())
        _launch("unpack_signs", signs, scales, numel, block or numel, values, blocks=blocks)
    return values


@torch.no_grad()
def quantize_int8(values: Tensor, *, block: int = 256) -> tuple[Tensor, Tensor]:
    """``(codes, scales)`` of flat fp32, bf16 or fp16 ``values``: int8 of n, fp32 of ceil(n / block).

    A block's scale is its largest magnitude / 127, a code the value / scale, to the nearest, ties to even.
    ``block`` is a multiple of 32. A block with inf or NaN gets a scale that is not finite, and comes back not
    finite. Bytes a value, 16 bit: 2 read (again from the cache) + 1 written. Raises ValueError.
    """
    check_flat("values", values, FLOATS)
    _check_block(block, 32, least=32)
    numel, device = values.numel(), values.device
    if not loader.use_kernels(values):
        largest = _rows(values.float().abs(), block).amax(1) if numel else values.float()
        scales = largest / as_tensor(127.0, values)  # by a number, a GPU would multiply with its inverse
        spread = _spread(scales, block, numel)
        codes = torch.where(spread > 0, values.float() / spread, 0.0).round()
        return codes.nan_to_num(-127.0).clamp(-127, 127).to(torch.int8), scales
    codes = torch.empty(numel, dtype=torch.int8, device=device)
    scales = torch.empty(_ceil(numel, block), dtype=torch.float32, device=device)
    if numel:
        warps = loader.blocks_for(32 * scales.numel())
        _launch("quantize_int8", values, numel, block, codes, scales, blocks=warps, source=values.dtype)
    return codes, scales


@torch.no_grad()
def dequantize_int8(codes: Tensor, scales: Tensor, out: Tensor, *, block: int = 256) -> None:
    """``out`` (flat fp32, bf16 or fp16) = codes * scales; the inverse of :func:`quantize_int8`.

    Bytes a value, 16 bit: 1 read + 2 written. Raises ValueError for wrong tensors or blocks.
    """
    check_flat("codes", codes, (torch.int8,))
    check_flat("out", out, FLOATS, codes)
    check_flat("scales", scales, _F32)
    check_device("scales", scales, codes)
    _check_block(block, 32, least=32)
    numel = codes.numel()
    _check_length("scales", scales, _ceil(numel, block))
    if not loader.use_kernels(codes):
        out.copy_(codes.float() * _spread(scales, block, numel))
    elif numel:
        blocks = loader.vector_blocks(codes)
        _launch("dequantize_int8", codes, scales, numel, block, out, blocks=blocks, target=out.dtype)


def _pack_on_device(values: Tensor, block: int, error: Tensor | None) -> tuple[Tensor, Tensor]:
    numel, device = values.numel(), values.device
    signs = torch.empty(_ceil(numel, 8), dtype=torch.uint8, device=device)
    if numel == 0:
        return signs, torch.empty(0, dtype=torch.float32, device=device)
    size = block or _SUM_SIZE
    sums = torch.empty(_ceil(numel, size), dtype=torch.float64, device=device)
    blocks = min(sums.numel(), loader.MAX_BLOCKS)
    _launch("magnitude_sums", values, error, numel, size, sums, blocks=blocks)
    share = block or numel
    if not block:
        sums = sums.sum().reshape(1)
    scales = (sums / _counts(numel, share, device)).float()
    blocks = loader.blocks_for(signs.numel())
    _launch("pack_signs", values, error, numel, share, scales, signs, blocks=blocks)
    return signs, scales


def _launch(
    kernel: str,
    *arguments: Tensor | float | None,
    blocks: int,
    source: torch.dtype = torch.float32,
    target: torch.dtype = torch.float32,
) -> None:
    first = arguments[0]
    assert isinstance(first, Tensor)
    defines = (loader.define("SRC", source), loader.define("DST", target))
    loader.launch("compress", kernel, *arguments, device=first.device, blocks=blocks, defines=defines)


def _ceil(numel: int, block: int) -> int:
    return -(-numel // block)


def _rows(values: Tensor, block: int) -> Tensor:
    """One row a block, the last one filled up with zeros."""
    if values.numel() == 0:
        return values.reshape(0, max(block, 1))
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).reshape(-1, block)


def _counts(numel: int, block: int, device: torch.device) -> Tensor:
    """How many elements each block has, float64."""
    starts = torch.arange(0, numel, max(block, 1), dtype=torch.float64, device=device)
    return (numel - starts).clamp(max=block)


def _spread(scales: Tensor, block: int, numel: int) -> Tensor:
    """The scale of every element."""
    return scales.repeat_interleave(max(block, 1), output_size=scales.numel() * max(block, 1))[:numel]


def _check_block(block: int, unit: int, *, least: int) -> None:
    if block < least or block % unit:
        raise ValueError(
            f"block is {block}, expected a multiple of {unit}{'' if least else ', or 0 for all'}"
        )


def _check_length(name: str, tensor: Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {expected}")
