"""Steps with narrow states and masters on the CPU, compiled by numba; for ``narrow_host`` alone.

A few blocks at a time are widened into the first level cache, stepped there by the kernels of
``host_kernels``, and narrowed again. What holds for those holds here. numba's cache looks at the date of this
file alone: touch it after a change of what it imports from there.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from typing import Any

import numpy as np

from .host_kernels import BFLOAT16, FLOAT32, NONE, Array, Index, Numbers, Raw, adam, compiled, lion, part, sgd

CODES = 4
BLOCK = 256
SPAN = 4 * BLOCK
"""Elements taken at a time."""
SMALLEST = np.float32(2.0**-96)
GOLDEN = np.uint32(0x9E3779B9)
State = tuple[Array, int, Array]
"""The bytes of a state, its kind, and the scales of its blocks."""


@part
def _mixed(x: np.uint32) -> Any:
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@part
def _random(random: Array, seed: np.uint32, place: np.int64, count: Index) -> None:
    """Write the random bits of ``count`` elements from ``place`` on."""
    for i in range(count):
        at = np.uint64(place) + np.uint64(i)
        high = np.uint32(np.uint32(at >> np.uint64(32)) * GOLDEN)
        random[i] = _mixed(np.uint32((np.uint32(at) ^ seed) + high))


@part
def _more_random(random: Array, count: Index) -> None:
    """Turn the bits for the states into those for the master."""
    for i in range(count):
        random[i] = _mixed(np.uint32(random[i] + GOLDEN))


@part
def _round(bits: Array, random: Array, shift: np.uint32, half: Array, start: Index, count: Index) -> None:
    """Round the bits of fp32 numbers to bf16 at random."""
    for i in range(count):
        u = bits[i]
        up = (random[i] >> shift) & np.uint32(0xFFFF)
        special = u | np.uint32(0x400000) if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else u
        finite = (u & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        half[start + i] = np.uint16((np.uint32(u + up) if finite else special) >> np.uint32(16))


@part
def _halves(data: Array, kind: int) -> Any:
    return data.view(np.uint16) if kind == BFLOAT16 else np.empty(0, np.uint16)


@part
def _wides(data: Array, kind: int) -> Any:
    return data.view(np.float32) if kind == FLOAT32 else np.empty(0, np.float32)


@part
def _widen(state: State, numbers: Array, start: Index, values: Array, count: Index) -> None:
    """Write a state's elements from ``start`` on, the first of a block, as fp32 into ``values``."""
    data, kind, scales = state
    half = _halves(data, kind)
    wide = _wides(data, kind)
    bits = values.view(np.uint32)
    if kind == FLOAT32:
        for i in range(count):
            values[i] = wide[start + i]
    elif kind == BFLOAT16:
        for i in range(count):
            bits[i] = np.uint32(half[start + i]) << np.uint32(16)
    elif kind == CODES:
        for first in range(0, count, BLOCK):
            scale = scales[(start + Index(first)) // Index(BLOCK)]
            for i in range(Index(first), min(Index(first + BLOCK), count)):
                values[i] = numbers[data[start + i]] * scale


@part
def _narrow(
    state: State,
    bounds: Array,
    lookup: Array,
    start: Index,
    values: Array,
    count: Index,
    random: Array,
    second: bool,
) -> None:
    """Write fp32 ``values`` into a state from ``start`` on."""
    data, kind, scales = state
    half = _halves(data, kind)
    wide = _wides(data, kind)
    bits = values.view(np.uint32)
    one = np.empty(1, np.uint32)
    number = one.view(np.float32)
    if kind == FLOAT32:
        for i in range(count):
            wide[start + i] = values[i]
    elif kind == BFLOAT16:
        _round(bits, random, np.uint32(16 if second else 0), half, start, count)
    elif kind == CODES:
        for first in range(0, count, BLOCK):
            low = Index(first)
            high = min(Index(first + BLOCK), count)
            largest = np.uint32(0)  # magnitude, then whether it is positive
            for i in range(low, high):
                u = np.uint32(bits[i])
                largest = max(largest, np.uint32((u << np.uint32(1)) | (np.uint32(1) - (u >> np.uint32(31)))))
            one[0] = largest >> np.uint32(1)
            finite = one[0] < np.uint32(0x7F800000)
            scale = np.float32(0) if number[0] < SMALLEST else number[0]
            if (largest & np.uint32(1)) == 0:
                scale = -scale
            inverse = np.float32(1) / scale if finite and scale != 0 else np.float32(0)
            scales[(start + low) // Index(BLOCK)] = scale if finite else np.float32(np.nan)
            for i in range(low, high):
                values[i] = values[i] * inverse if finite else np.float32(0)
            least = np.uint8(1 if second else 0)
            for i in range(low, high):
                code = lookup[bits[i] >> np.uint32(16)]
                code += np.uint8(bounds[code] < values[i])
                data[start + i] = max(code, least) if values[i] > 0 else code


@part
def _begin(
    master: Raw, grad: Raw, out: Raw, first: State, second: State, tables: Array, at: int, scratch: Array
) -> Any:
    """Widen master and states, from element ``at`` on, into rows of ``scratch``; return their count, and the
    parts of ``grad`` and ``out``.
    """
    wide = 4 if master[1] == FLOAT32 else 2
    thin = 4 if grad[1] == FLOAT32 else 2
    s = Index(at)
    count = Index(min(SPAN, master[0].size // wide - at))
    _widen((master[0], master[1], np.empty(0, np.float32)), tables[0], s, scratch[0], count)
    _widen(first, tables[0], s, scratch[1], count)
    _widen(second, tables[2], s, scratch[2], count)
    stop = at + np.int64(count)
    gradient = grad[0][at * thin : stop * thin], grad[1]
    cast = out[0][at * 2 : stop * 2] if out[1] != NONE else out[0][:0], out[1]
    return count, gradient, cast


@part
def _end(
    master: Raw,
    first: State,
    second: State,
    tables: Array,
    lookup: Array,
    seed: np.uint32,
    place: np.int64,
    at: int,
    count: Index,
    scratch: Array,
    random: Array,
) -> None:
    """Narrow the rows of ``scratch`` back to where they came from."""
    s = Index(at)
    _random(random, seed, place + at, count)
    _narrow(first, tables[1], lookup[0], s, scratch[1], count, random, False)
    _narrow(second, tables[3], lookup[1], s, scratch[2], count, random, True)
    _more_random(random, count)
    value = master[0], master[1], np.empty(0, np.float32)
    _narrow(value, tables[1], lookup[0], s, scratch[0], count, random, False)


@part
def _elements(master: Raw) -> Any:
    return master[0].size // (4 if master[1] == FLOAT32 else 2)


# A kernel for each rule. ``numbers`` are those of host_kernels, ``tables`` those of narrow_state, ``lookup``
# is that of narrow_host; ``seed`` and ``place`` begin the random bits.


@compiled
def narrow_adam(
    master: Raw,
    grad: Raw,
    out: Raw,
    first: State,
    second: State,
    numbers: Numbers,
    tables: Array,
    lookup: Array,
    seed: np.uint32,
    place: np.int64,
) -> None:
    """Step Adam."""
    scratch = np.empty((3, SPAN), np.float32)
    random = np.empty(SPAN, np.uint32)
    for at in range(0, _elements(master), SPAN):
        n, g, cast = _begin(master, grad, out, first, second, tables, at, scratch)
        adam(scratch[0, :n], scratch[1, :n], scratch[2, :n], g, cast, numbers)
        _end(master, first, second, tables, lookup, seed, place, at, n, scratch, random)


@compiled
def narrow_sgd(
    master: Raw,
    grad: Raw,
    out: Raw,
    first: State,
    second: State,
    numbers: Numbers,
    tables: Array,
    lookup: Array,
    seed: np.uint32,
    place: np.int64,
) -> None:
    """Step SGD."""
    scratch = np.empty((3, SPAN), np.float32)
    random = np.empty(SPAN, np.uint32)
    for at in range(0, _elements(master), SPAN):
        n, g, cast = _begin(master, grad, out, first, second, tables, at, scratch)
        sgd(scratch[0, :n], scratch[1, : n if first[1] != NONE else Index(0)], g, cast, numbers)
        _end(master, first, second, tables, lookup, seed, place, at, n, scratch, random)


@compiled
def narrow_lion(
    master: Raw,
    grad: Raw,
    out: Raw,
    first: State,
    second: State,
    numbers: Numbers,
    tables: Array,
    lookup: Array,
    seed: np.uint32,
    place: np.int64,
) -> None:
    """Step Lion."""
    scratch = np.empty((3, SPAN), np.float32)
    random = np.empty(SPAN, np.uint32)
    for at in range(0, _elements(master), SPAN):
        n, g, cast = _begin(master, grad, out, first, second, tables, at, scratch)
        lion(scratch[0, :n], scratch[1, :n], g, cast, numbers)
        _end(master, first, second, tables, lookup, seed, place, at, n, scratch, random)


def ready(name: str) -> Any:
    """Return the kernel of that name after a call without elements: what can fail has failed by then."""
    function, count = {"adam": (narrow_adam, 8), "sgd": (narrow_sgd, 7), "lion": (narrow_lion, 5)}[name]
    raw = (np.empty(0, np.uint8), NONE)
    none = np.empty(0, np.float32)
    tables = np.empty((4, BLOCK), np.float32)
    lookup = np.empty((2, 1 << 16), np.uint8)
    states = (*raw, none), (*raw, none)
    function(raw, raw, raw, *states, (np.float32(1),) * count, tables, lookup, np.uint32(0), np.int64(0))
    return function
