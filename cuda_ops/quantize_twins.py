"""Block quantisation in plain torch: where there are no kernels, and what the kernels must equal to the bit.

Arguments and formulas are those of the functions in ``quantize``, after their checks. Nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SMALLEST = 2.0**-126
"""The least scale of a block that is not all zeros: the smallest normal number. Its reciprocal is finite."""
_HOST_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 26
"""Elements taken at a time: temporaries stay in the cache, or small beside the device's memory."""


def quantize(
    values: Tensor, error: Tensor | None, packed: Tensor, bits: int, block: int, beta: float
) -> None:
    """Quantise blocks, of ``values + error`` if there is an error, which is then updated."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    codes, scales = split(packed, values.numel(), bits)
    most = 2 ** (bits - 1) - 1
    # a tensor: a device would multiply by the reciprocal of a plain number
    divisor = torch.full((), most, dtype=wide, device=values.device)
    for rows in _chunks(values, block):
        part = slice(rows.start * block, rows.stop * block)
        given = values[part].to(wide).view(-1, block)
        old = None if error is None else error[part].to(wide).view(-1, block)
        whole = given if old is None else given + old
        low, high = whole.aminmax(dim=1)
        largest = torch.maximum(-low, high)
        scale = (largest / divisor).float()
        finite = scale.isfinite()
        scale = torch.where(largest == 0, 0.0, scale.clamp(min=SMALLEST)).where(finite, torch.nan)
        inverse = scale.to(wide).reciprocal().where(scale > 0, 0.0)
        # no more than most: the roundings before come to far less than a half
        found = (whole * inverse.unsqueeze(1)).round_()
        found.masked_fill_(~finite.unsqueeze(1), 0.0)
        scales[rows] = scale
        _write(codes[part.start * bits // 8 : part.stop * bits // 8], found.view(-1), bits)
        if error is not None and old is not None:
            lost = whole.sub_(found.mul_(scale.to(wide).unsqueeze(1)))
            later = (old * beta).add_(lost.mul_(1 - beta))
            error[part] = torch.where(finite.unsqueeze(1), later, old).view(-1).to(error.dtype)


def dequantize_sum(packed_rows: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Write the sum of what the rows stand for."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    parts = [split(row, out.numel(), bits) for row in packed_rows]
    for rows in _chunks(out, block):
        part = slice(rows.start * block, rows.stop * block)
        total: Tensor | None = None
        for codes, scales in parts:
            found = _read(codes[part.start * bits // 8 : part.stop * bits // 8], bits, wide)
            found.view(-1, block).mul_(scales[rows].to(wide).unsqueeze(1))
            total = found if total is None else total.add_(found)
        if total is not None:
            out[part] = total.to(out.dtype)


def split(packed: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes' bytes and the fp32 scales of a packed buffer, as views."""
    at = numel * bits // 8
    return packed[:at], packed[at:].view(torch.float32)


def _chunks(tensor: Tensor, block: int) -> Iterator[slice]:
    """Yield slices of whole blocks of a flat tensor, counted in blocks."""
    count = tensor.numel() // block
    step = max(1, (_HOST_CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK) // block)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _write(target: Tensor, found: Tensor, bits: int) -> None:
    """Write whole numbers as codes of one byte, or of half a byte, the low half first."""
    if bits == 8:
        target.view(torch.int8).copy_(found)
        return
    codes = found.to(torch.int8).view(torch.uint8).view(-1, 2)
    torch.bitwise_or(codes[:, 0] & 15, codes[:, 1] << 4, out=target)


def _read(source: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return codes as numbers of another type."""
    if bits == 8:
        return source.view(torch.int8).to(dtype)
    found = torch.empty(source.numel(), 2, dtype=dtype, device=source.device)
    found[:, 0] = (source << 4).view(torch.int8) >> 4
    found[:, 1] = source.view(torch.int8) >> 4
    return found.view(-1)
