"""Optimizer state in 16 or 8 bits: its layout, and plain torch to and from fp32.

A narrow entry is two entries of a piece's state: under the usual name a tensor of the piece's shape, bf16
or codes of 8 bits (uint8), and under ``NAME_scale`` the fp32 scales of the blocks, of shape (blocks, 1), with
no blocks for bf16. A block is :data:`BLOCK` elements, counted from the piece's start.

A code is an index into a map of 256 numbers from -1 to 1, or from 0 to 1 for a second moment; the number
times the block's scale is the value. Map and block are those of bitsandbytes ("8-bit Optimizers via
Block-wise Quantization", Dettmers et al., 2022), with two differences. The scale is the element of the
largest magnitude with its sign, so that this element is kept exactly (the signed map has 1, but not -1), and
what was read from codes becomes the same codes again. And a second moment above 0 never becomes 0 (where its
block's largest is above 2**-96), which would turn an element whose gradient pauses into one that moves by
``lr * exp_avg / eps``.

The 8-bit optimizers of bitsandbytes themselves keep three entries: codes ``state1``, the map ``qmap1``, and
``absmax1``, the largest magnitude of each block (blocks,); and the same with 2. Such an entry is narrow too,
of the kind ``"bitsandbytes"``: it is cut, saved and loaded as fp32 like the others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

STATE_DTYPES = ("fp32", "bf16", "int8")
BLOCK = 256
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK}
"""Bytes of a state's element, its part of a block's scale included."""
SMALLEST = 2.0**-96
"""Blocks without a larger magnitude become zeros: products of a smaller scale would not be exact in fp32."""
SCALE = "_scale"
UNSIGNED = "exp_avg_sq"
"""Names the state that is never negative."""


def make_map(signed: bool) -> Tensor:
    """Return the 256 numbers that codes stand for, in rising order: fp32 on the CPU.

    Seven decades, from 1e-7 to 1; the i-th is divided evenly into 2**i parts (signed, for either sign) or
    2**(i+1), whose middles are taken; and 0 and 1. Source: appendix of the paper named above.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        ends = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float32)
        middles = (10.0 ** (i - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32)


@functools.cache
def tables(device: torch.device) -> Tensor:
    """Return four rows of 256 fp32 numbers: the signed map and the bounds between its numbers'
    neighbourhoods, then both of the other map. A code is the count of bounds below a value; inf follows the
    last bound.
    """
    rows = []
    for signed in (True, False):
        numbers = make_map(signed).double()
        bounds = ((numbers[:-1] + numbers[1:]) / 2).float()
        rows += [numbers.float(), torch.cat([bounds, torch.tensor([torch.inf])])]
    return torch.stack(rows).to(device)


_CHUNK = 1 << 22
"""Elements converted at a time, a multiple of :data:`BLOCK`: temporaries are several times their size."""


def quantize_state(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise flat fp32 ``values`` of n elements: uint8 codes (n,) and fp32 scales (blocks, 1).

    A block with inf or NaN gets the scale NaN, so that all of it comes back as NaN.
    """
    table = tables(values.device)[0 if signed else 2 :]
    found = [_quantize(part, table, signed) for part in torch.split(values, _CHUNK)]
    codes, scales = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantize(values: Tensor, table: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    numel = values.numel()
    blocks = -(-numel // BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - numel)).view(blocks, BLOCK)
    if not numel:
        return padded.to(torch.uint8).view(-1), padded[:, :1]
    low, high = padded.aminmax(dim=1)
    scale = torch.where(high >= -low, high, low)
    scale = torch.where(scale.abs() < SMALLEST, 0.0, scale).where(high.isfinite() & low.isfinite(), torch.nan)
    inverse = torch.where((scale == 0) | scale.isnan(), 0.0, scale.reciprocal())
    ratio = (padded * inverse.unsqueeze(1)).nan_to_num_(0.0)
    codes = torch.searchsorted(table[1, :-1].contiguous(), ratio)
    if not signed:
        codes = torch.maximum(codes, (ratio > 0).long())
    return codes.to(torch.uint8).view(-1)[:numel], scale.unsqueeze(1)


def _spread(codes: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the flat fp32 values of codes: their ``numbers`` times the scales of their blocks."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for start in range(0, codes.numel(), _CHUNK):
        part = codes[start : start + _CHUNK]
        first = start // BLOCK
        spread = scale[first : first - (-part.numel() // BLOCK)].expand(-1, BLOCK).reshape(-1)
        torch.mul(numbers[part.long()], spread[: part.numel()], out=values[start : start + _CHUNK])
    return values


def dequantize_state(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the flat fp32 values that uint8 ``codes`` and the scales of their blocks stand for."""
    return _spread(codes, tables(codes.device)[0 if signed else 2], scale)


def _as_bitsandbytes(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest ``numbers`` in the values' shape, and the scales of their blocks
    (blocks,).

    The signed map has 1, but no -1. A block whose largest magnitude is negative gets the scale by which this
    element is the map's least number, so that what was read from codes becomes the same codes again.
    """
    bounds = (numbers[:-1] + numbers[1:]) / 2
    codes = []
    scales = []
    for part in torch.split(values.reshape(-1), _CHUNK):
        blocks = -(-part.numel() // BLOCK)
        padded = torch.nn.functional.pad(part, (0, blocks * BLOCK - part.numel())).view(blocks, BLOCK)
        low, high = padded.aminmax(dim=1)
        scale = torch.where(high > -low, high, low / torch.where(low < 0, numbers[0], -1.0))
        ratio = padded / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
        codes.append(torch.searchsorted(bounds, ratio).to(torch.uint8).view(-1)[: part.numel()])
        scales.append(scale)
    return torch.cat(codes).view(values.shape), torch.cat(scales)


# -- a piece's entries

Entries = Mapping[str, Any]
_BITSANDBYTES = {f"state{number}": (f"qmap{number}", f"absmax{number}") for number in (1, 2)}
"""Maps the codes of bitsandbytes to their map and their blocks' scales."""


def _companions(own: Entries, key: str) -> tuple[str, ...]:
    """Return the names of the entries that a narrow entry needs besides its own; none for another entry."""
    if key + SCALE in own:
        return (key + SCALE,)
    names = _BITSANDBYTES.get(key, ())
    if not names or any(name not in own for name in names):
        return ()
    # Not read: AdEMAMix's two rows for each element, and the blocks of 2048 that earlier versions had.
    blocks = -(-own[key].numel() // BLOCK)
    return names if own[names[1]].shape == (blocks,) else ()


def is_narrow(own: Entries, key: str) -> bool:
    """Tell whether the entry ``key`` of a piece's state is kept in fewer than 32 bits."""
    return bool(_companions(own, key))


def kind_of(own: Entries, key: str) -> str:
    """Return the dtype of :data:`STATE_DTYPES` that an entry is kept in, or ``"bitsandbytes"``."""
    names = _companions(own, key)
    if len(names) > 1:
        return "bitsandbytes"
    return "fp32" if not names else "int8" if own[key].dtype == torch.uint8 else "bf16"


def is_scale(own: Entries, key: str) -> bool:
    """Tell whether ``key`` names an entry that a narrow one needs besides its own."""
    if key.endswith(SCALE):
        return key.removesuffix(SCALE) in own
    return any(key in names and is_narrow(own, state) for state, names in _BITSANDBYTES.items())


def narrow_entries(own: Entries, key: str) -> dict[str, Tensor]:
    """Return a narrow entry and those that it needs; nothing for another entry."""
    names = _companions(own, key)
    return {name: own[name] for name in (key, *names)} if names else {}


def widen(own: Entries, key: str) -> Tensor:
    """Return a narrow entry's values in a new fp32 tensor of its shape."""
    kept: Tensor = own[key]
    if kind_of(own, key) == "bitsandbytes":
        numbers, largest = (own[name] for name in _companions(own, key))
        return _spread(kept.view(-1), numbers, largest.unsqueeze(1)).view(kept.shape)
    if kept.dtype != torch.uint8:
        return kept.float()
    return dequantize_state(kept.view(-1), own[key + SCALE], signed=key != UNSIGNED).view(kept.shape)


def widen_all(own: Entries) -> Entries:
    """Return the entries with narrow ones in new fp32 tensors, and without scales."""
    if not any(is_narrow(own, key) for key in own):
        return own
    return {
        key: widen(own, key) if is_narrow(own, key) else value
        for key, value in own.items()
        if not is_scale(own, key)
    }


def put(own: MutableMapping[str, Any], key: str, values: Tensor, kind: str) -> None:
    """Keep fp32 ``values`` as the entry ``key`` in a kind of :func:`kind_of`; memory of the right size is
    used again. bf16 is rounded to the nearest. For ``"bitsandbytes"``, the map is in ``own``.
    """
    if kind == "bitsandbytes":
        numbers, largest = _BITSANDBYTES[key]
        codes, scale = _as_bitsandbytes(values, own[numbers])
        made = {key: codes, largest: scale}
    elif kind == "fp32":
        made = {key: values}
    elif kind == "bf16":
        made = {key: values.bfloat16(), key + SCALE: values.new_empty(0, 1)}
    else:
        codes, scale = quantize_state(values, signed=key != UNSIGNED)
        made = {key: codes, key + SCALE: scale}
    for name, tensor in made.items():
        there = own.get(name)
        if isinstance(there, Tensor) and there.dtype == tensor.dtype and there.shape == tensor.shape:
            there.copy_(tensor)
        else:
            own[name] = tensor


def narrow_as(own: Entries, wide: MutableMapping[str, Any]) -> None:
    """Narrow in ``wide`` the entries that are narrow in ``own``."""
    for key in [key for key in wide if is_narrow(own, key)]:
        if kind_of(own, key) == "bitsandbytes":
            numbers = _BITSANDBYTES[key][0]
            wide[numbers] = own[numbers]
        put(wide, key, wide[key], kind_of(own, key))


def fresh(leaf: Tensor, key: str, kind: str) -> dict[str, Tensor]:
    """Return the entries of a state that begins with zeros, for a flat piece ``leaf``."""
    if kind == "fp32":
        return {key: torch.zeros_like(leaf.detach(), dtype=torch.float32)}
    dtype, blocks = (torch.bfloat16, 0) if kind == "bf16" else (torch.uint8, -(-leaf.numel() // BLOCK))
    scale = torch.zeros(blocks, 1, device=leaf.device)
    return {key: torch.zeros_like(leaf.detach(), dtype=dtype), key + SCALE: scale}


def keep_or_make(own: Entries, leaf: Tensor, key: str, kind: str) -> dict[str, Tensor]:
    """Return a state's narrow entries of ``own``, or new ones where those are missing or another dtype's."""
    if key in own and kind_of(own, key) == kind:
        return narrow_entries(own, key)
    return fresh(leaf, key, kind)
