"""Block quantisation on the CPU in one pass over memory, compiled by numba; for ``quantize_host`` alone.

A block is widened to fp32 in the first level cache; results are those of the twins to the bit. What holds
for the kernels of ``host_kernels`` holds here. numba's cache looks at the date of this file alone: touch it
after a change of what it imports from there.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from typing import Any

import numpy as np

from .host_kernels import FLOAT32, NONE, Array, Index, Numbers, Raw, compiled, narrow, part, views, widen

MAGIC = np.float32(1.5 * 2**23)
"""Added to a small number it rounds it to a whole one, ties to even, whose low bits are those of the sum."""
SMALLEST = np.float32(2.0**-126)
NAN = np.float32(np.nan)


@part
def _scale(x: Array, most: np.float32, one: Array, count: Index) -> Any:
    """Return the scale of a block; NaN is the largest of all bit patterns. ``one``: scratch."""
    bits = x.view(np.uint32)
    pattern = one.view(np.uint32)
    largest = np.uint32(0)
    for i in range(count):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    if largest >= np.uint32(0x7F800000):
        return NAN
    if largest == 0:
        return np.float32(0)
    pattern[0] = largest
    return max(one[0] / most, SMALLEST)


@compiled
def quantize(
    values: Raw, error: Raw, codes: Array, scales: Array, block: int, bits: int, numbers: Numbers
) -> None:
    """Quantise blocks. ``numbers``: beta, 1 - beta."""
    half, wide = views(values)
    error_half, error_wide = views(error)
    count = Index(block)
    x = np.empty(block, np.float32)
    e = np.empty(block, np.float32)
    y = np.empty(block, np.float32)
    found = y.view(np.uint32)
    updated = e.view(np.uint32)
    most = np.float32(127 if bits == 8 else 7)
    beta, one_minus_beta = numbers
    for b in range(scales.size):
        s = Index(b * block)
        widen(half, wide, values[1], s, x, count)
        if error[1] != NONE:
            widen(error_half, error_wide, error[1], s, e, count)
            for i in range(count):
                x[i] += e[i]
        scale = _scale(x, most, y, count)
        scales[b] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        if scale == scale:
            for i in range(count):
                y[i] = x[i] * inverse + MAGIC
        else:
            for i in range(count):
                y[i] = MAGIC
        if bits == 8:
            for i in range(count):
                codes[s + i] = np.uint8(found[i])
        else:
            at = s // Index(2)
            for i in range(count // Index(2)):
                low = found[Index(2) * i]
                high = found[Index(2) * i + Index(1)]
                codes[at + i] = np.uint8((low & np.uint32(15)) | (high << np.uint32(4)))
        if error[1] != NONE and scale == scale:
            for i in range(count):
                e[i] = beta * e[i] + one_minus_beta * (x[i] - (y[i] - MAGIC) * scale)
            if error[1] == FLOAT32:
                for i in range(count):
                    error_wide[s + i] = e[i]
            else:
                narrow(updated, Index(0), error_half, error[1], s, x, count)


@compiled
def dequantize_sum(packed: Array, rows: int, out: Raw, first: int, last: int, block: int, bits: int) -> None:
    """Write the sum of what rows stand for, blocks ``first`` to ``last - 1``. ``packed``: all rows' bytes."""
    half, wide = views(out)
    numel = out[0].size // (4 if out[1] == FLOAT32 else 2)
    stride = packed.size // rows
    start = numel * bits // 8
    words = packed.view(np.float32)
    count = Index(block)
    total = np.empty(block, np.float32)
    scratch = np.empty(block, np.float32)
    for b in range(first, last):
        s = Index(b * block)
        for row in range(rows):
            scale = words[(row * stride + start) // 4 + b]
            at = Index(row * stride + b * block * bits // 8)
            if bits == 8:
                for i in range(count):
                    scratch[i] = np.float32(np.int8(packed[at + i])) * scale
            else:
                for i in range(count // Index(2)):
                    byte = np.int8(packed[at + i])
                    scratch[Index(2) * i] = np.float32(np.int8(byte << 4) >> 4) * scale
                    scratch[Index(2) * i + Index(1)] = np.float32(byte >> 4) * scale
            if row == 0:
                for i in range(count):
                    total[i] = scratch[i]
            else:
                for i in range(count):
                    total[i] += scratch[i]
        if out[1] == FLOAT32:
            for i in range(count):
                wide[s + i] = total[i]
        else:
            narrow(total.view(np.uint32), Index(0), half, out[1], s, scratch, count)


def compile_all() -> None:
    """Call all kernels without elements: what can fail has failed by then."""
    raw = np.empty(0, np.uint8), NONE
    none = np.empty(0, np.float32)
    quantize(raw, raw, raw[0], none, 32, 8, (np.float32(0), np.float32(1)))
    dequantize_sum(raw[0], 1, raw, 0, 0, 32, 8)
