"""Compression to signs on the CPU in one pass over memory, compiled by numba; for ``signs_host`` alone.

Results are those of the twins to the bit: sums are taken in the order of a warp's threads. What holds for the
kernels of ``host_kernels`` holds here.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import numpy as np

from .host_kernels import Array, Index, compiled

SMALLEST = np.float32(2.0**-126)
NAN = np.float32(np.nan)
BLOCK, LANES, GROUP = 256, 32, 8


@compiled
def compress(values: Array, packed: Array, scales: Array) -> None:
    """Pack the signs of whole blocks."""
    y, sums, one = np.empty(BLOCK, np.float32), np.empty(LANES, np.float32), np.empty(1, np.float32)
    pattern, bits = one.view(np.uint32), values.view(np.uint32)
    for b in range(scales.size):
        s = Index(b * BLOCK)
        largest = np.uint32(0)
        for i in range(Index(BLOCK)):
            largest = max(largest, bits[s + i] & np.uint32(0x7FFFFFFF))
        for i in range(Index(LANES)):
            byte = np.uint8(0)
            for k in range(Index(GROUP)):
                if values[s + i * Index(GROUP) + k] >= 0:
                    byte |= np.uint8(1 << k)
            packed[s // Index(8) + i] = byte
        if largest >= np.uint32(0x7F800000):
            scales[b] = NAN
            continue
        pattern[0] = largest
        most = max(one[0], SMALLEST)
        inverse = np.float32(1) / most
        for i in range(Index(BLOCK)):
            part = values[s + i] * inverse
            y[i] = part * part
        for i in range(Index(LANES)):
            total = y[i * Index(GROUP)]
            for k in range(Index(1), Index(GROUP)):
                total += y[i * Index(GROUP) + k]
            sums[i] = total
        half = Index(LANES // 2)
        while half > Index(0):
            # what a thread and its partner have is equal afterwards, so the first half suffices
            for i in range(half):
                sums[i] = sums[i] + sums[i + half]
            half = half // Index(2)
        scale = most * np.sqrt(sums[0] / np.float32(BLOCK))
        scales[b] = scale
        for i in range(Index(BLOCK)):
            values[s + i] -= scale if values[s + i] >= 0 else -scale


@compiled
def expand(packed: Array, rows: int, out: Array, first: int, last: int, factor: np.float32) -> None:
    """Write the sums of rows, blocks ``first`` to ``last - 1``. ``packed``: all rows' bytes."""
    stride, start = packed.size // rows, out.size // 8
    words = packed.view(np.float32)
    total = np.empty(BLOCK, np.float32)
    for b in range(first, last):
        s = Index(b * BLOCK)
        total[:] = np.float32(0)
        for row in range(rows):
            scale = words[(row * stride + start) // 4 + b]
            at = Index(row * stride + b * LANES)
            for i in range(Index(LANES)):
                byte = packed[at + i]
                for k in range(Index(GROUP)):
                    positive = (byte >> k) & np.uint8(1)
                    total[i * Index(GROUP) + k] += scale if positive else -scale
        for i in range(Index(BLOCK)):
            out[s + i] = total[i] * factor


def compile_all() -> None:
    """Call all kernels without elements: what can fail has failed by then."""
    none, raw = np.empty(0, np.float32), np.empty(0, np.uint8)
    compress(none, raw, none)
    expand(raw, 1, none, 0, 0, np.float32(1))
