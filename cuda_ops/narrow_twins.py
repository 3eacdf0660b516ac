"""Steps with narrow states and masters in plain torch: where there are no kernels; what those equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import twins
from .arguments import AdamArgs, LionArgs, Scalar, SgdArgs
from .narrow_state import dequantize_state, quantize_state

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
States = Sequence[tuple[Tensor, Tensor | None]]
"""An optimizer's states of a piece, each with the scales of its blocks (None or without blocks: no codes)."""


def mixed(x: Tensor) -> Tensor:
    """Mix 32-bit numbers, held in int64 (Wellons, "Prospecting for Hash Functions": lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def random_bits(key: int, step: Scalar, place: int, numel: int, device: torch.device) -> Tensor:
    """Return 32 random bits, in int64, for each element from ``place`` on of what ``key`` names. The first
    state is rounded by the lower 16, the second by the upper, the master by those of :func:`for_master`.
    """
    count = twins.as_tensor(step, torch.empty(0, device=device)).long() & _MASK
    at = torch.arange(place, place + numel, device=device)
    return mixed((((at & _MASK) ^ mixed(mixed(count) ^ key)) + (at >> 32) * _GOLDEN) & _MASK)


def for_master(bits: Tensor) -> Tensor:
    """Return further bits from those of :func:`random_bits`."""
    return mixed((bits + _GOLDEN) & _MASK)


def round_stochastic(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with the chance that makes the mean right, by the lower 16 of ``bits``.
    inf stays inf, NaN NaN.
    """
    pattern = values.view(torch.int32).long() & _MASK
    special = (pattern & 0x7F800000) == 0x7F800000
    up = torch.where(special, values.isnan().long() << 22, bits & 0xFFFF)
    found = torch.where(special, pattern | up, pattern + up) >> 16
    return found.to(torch.int32).to(torch.uint16).view(torch.bfloat16)


def step(
    master: Tensor,
    states: States,
    grad: Tensor,
    out: Tensor | None,
    count: Scalar,
    args: AdamArgs | SgdArgs | LionArgs,
    key: int,
    place: int,
) -> None:
    """Widen, step by the twin of ``args``, narrow. Where found_inf is not 0 the values are those of before,
    which become the same codes and bits again.
    """
    wide = master.float()
    values = [_widen(kept, scale, signed=index == 0) for index, (kept, scale) in enumerate(states)]
    if isinstance(args, AdamArgs):
        twins.adam(wide, values[0], values[1], grad, out, count, args)
    elif isinstance(args, SgdArgs):
        twins.sgd(wide, values[0] if values else None, grad, out, count, args)
    else:
        twins.lion(wide, values[0], grad, out, args)
    bits = random_bits(key, count, place, master.numel(), master.device)
    if master.dtype == torch.bfloat16:
        master.copy_(round_stochastic(wide, for_master(bits)))
    else:
        master.copy_(wide)
    for index, ((kept, scale), value) in enumerate(zip(states, values, strict=True)):
        if kept.dtype == torch.bfloat16:
            kept.copy_(round_stochastic(value, bits >> 16 * index))
        elif kept.dtype == torch.uint8:
            assert scale is not None
            codes, scales = quantize_state(value, signed=index == 0)
            kept.copy_(codes)
            scale.copy_(scales)
        else:
            kept.copy_(value)


def _widen(kept: Tensor, scale: Tensor | None, *, signed: bool) -> Tensor:
    if kept.dtype != torch.uint8:
        return kept.to(torch.float32, copy=True)
    assert scale is not None
    return dequantize_state(kept, scale, signed=signed)
