"""Compression to signs in plain torch: where there are no kernels, and what kernels must equal to the bit.

Arguments and formulas are those of the functions in ``signs``, after their checks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .quantize_twins import SMALLEST

_BLOCK = 256
_LANES = 32
_GROUP = 8
_HOST_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 26
"""Elements taken at a time: temporaries stay in the cache, or small beside the device's memory."""


def compress(values: Tensor, packed: Tensor) -> None:
    """Pack signs; leave in ``values`` what that loses."""
    bits, scales = split(packed, values.numel())
    for part in _chunks(values):
        x = values[part].view(-1, _BLOCK)
        largest = x.abs().amax(dim=1)
        finite = largest.isfinite()
        most = largest.clamp(min=SMALLEST)
        y = (x * most.reciprocal().unsqueeze(1)).view(-1, _LANES, _GROUP)
        y *= y
        sums = y[..., 0].clone()
        for k in range(1, _GROUP):
            sums += y[..., k]
        lanes = torch.arange(_LANES, device=x.device)
        for mask in (16, 8, 4, 2, 1):  # in the order of a warp's threads
            sums = sums + sums[:, lanes ^ mask]
        root = (
            (sums[:, 0] / _BLOCK).double().sqrt().to(x.dtype)
        )  # torch's own in fp32 is not always the nearest
        scale = (most * root).float().where(finite, torch.nan)
        scales[part.start // _BLOCK : part.stop // _BLOCK] = scale
        positive = x >= 0
        bits[part.start // 8 : part.stop // 8] = _pack(positive)
        wide = scale.to(x.dtype).unsqueeze(1)
        lost = x - torch.where(positive, wide, -wide)
        x.copy_(torch.where(finite.unsqueeze(1), lost, x))


def expand(packed_rows: Tensor, out: Tensor, factor: float) -> None:
    """Write ``factor`` times the sum of what the rows stand for."""
    parts = [split(row, out.numel()) for row in packed_rows]
    for part in _chunks(out):
        total = torch.zeros(part.stop - part.start, dtype=out.dtype, device=out.device).view(-1, _BLOCK)
        for bits, scales in parts:
            wide = scales[part.start // _BLOCK : part.stop // _BLOCK].to(out.dtype).unsqueeze(1)
            positive = _unpack(bits[part.start // 8 : part.stop // 8]).view(-1, _BLOCK)
            total += torch.where(positive, wide, -wide)
        out[part] = total.mul_(torch.tensor(factor, dtype=torch.float32).to(out.dtype)).view(-1)


def split(packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the bits' bytes and the fp32 scales of a packed buffer, as views."""
    return packed[: numel // 8], packed[numel // 8 :].view(torch.float32)


def _pack(positive: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=positive.device)
    return (positive.view(-1, 8).to(torch.uint8) << places).sum(dim=1, dtype=torch.uint8)


def _unpack(bits: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(1) >> places & 1).bool().view(-1)


def _chunks(tensor: Tensor) -> Iterator[slice]:
    """Yield slices of whole blocks of a flat tensor."""
    step = _HOST_CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK
    for start in range(0, tensor.numel(), step):
        yield slice(start, min(start + step, tensor.numel()))
