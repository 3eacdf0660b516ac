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
BLOCK = 256
LANES = 32
GROUP = 8
GATHER = np.uint64(0x0102040810204080)
"""Times eight bytes of 0 or 1: the upmost byte has them as its bits, the first one lowest."""
COPIES = np.uint64(0x0101010101010101)
PLACES = np.uint64(0x8040201008040201)
"""A byte times the one has eight copies; the other leaves the k-th bit of the k-th."""


@compiled
def compress(values: Array, packed: Array, scales: Array) -> None:
    """Pack the signs of whole blocks."""
    y = np.empty(BLOCK, np.float32)
    sums = np.empty(LANES, np.float32)
    one = np.empty(1, np.float32)
    flags = np.empty(BLOCK, np.uint8)
    pattern = one.view(np.uint32)
    bits = values.view(np.uint32)
    eights = flags.view(np.uint64)
    for b in range(scales.size):
        s = Index(b * BLOCK)
        largest = np.uint32(0)
        for i in range(Index(BLOCK)):
            largest = max(largest, bits[s + i] & np.uint32(0x7FFFFFFF))
        for i in range(Index(BLOCK)):
            flags[i] = np.uint8(values[s + i] >= 0)
        at = s // Index(GROUP)
        for i in range(Index(LANES)):
            packed[at + i] = np.uint8((eights[i] * GATHER) >> np.uint64(56))
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
    stride = packed.size // rows
    start = out.size // 8
    words = packed.view(np.float32)
    total = np.empty(BLOCK, np.float32)
    flags = np.empty(BLOCK, np.uint8)
    eights = flags.view(np.uint64)
    for b in range(first, last):
        s = Index(b * BLOCK)
        total[:] = np.float32(0)
        for row in range(rows):
            scale = words[(row * stride + start) // 4 + b]
            at = Index(row * stride + b * LANES)
            for i in range(Index(LANES)):
                eights[i] = np.uint64(packed[at + i]) * COPIES & PLACES
            for i in range(Index(BLOCK)):
                total[i] += scale if flags[i] else -scale
        for i in range(Index(BLOCK)):
            out[s + i] = total[i] * factor


@compiled
def frozen_adam(
    w: Array, m: Array, v: Array, momentum: Array, lr: np.float32, decay: np.float32, eps: np.float32
) -> None:
    """Step Adam with a variance that stays as it is."""
    for i in range(Index(w.size)):
        a = momentum[i] * (np.float32(1) if v[i] > 0 else np.float32(0))
        m[i] = a
        w[i] -= lr * (a / (np.sqrt(v[i]) + eps) + decay * w[i])


def compile_all() -> None:
    """Call all kernels without elements: what can fail has failed by then."""
    none = np.empty(0, np.float32)
    raw = np.empty(0, np.uint8)
    compress(none, raw, none)
    expand(raw, 1, none, 0, 0, np.float32(1))
    frozen_adam(none, none, none, none, *(np.float32(1),) * 3)
