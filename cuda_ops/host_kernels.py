"""The optimizer steps on the CPU in one pass over memory, compiled by numba; for ``host``, and the casts for
``quantize_host_kernels``.

A kernel works on one chunk, without the GIL and in one thread, in blocks that fit the first level cache:
gradients to fp32, update, cast. Each loop touches few enough arrays for LLVM to vectorise it, and takes them
by an unsigned index: a slice would count references, a signed index might be negative. No fast-math: the
results are those of the same fp32 operations one by one, wherever a chunk begins.

``grad`` and ``out`` come as bytes with a kind, because numpy knows no bf16 and numba no fp16.
``coefficients`` are a tuple of fp32 numbers; ``w`` is the master, ``m`` and ``v`` are the moments.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba  # type: ignore[import-untyped, import-not-found, unused-ignore]
import numpy as np

NONE, FLOAT32, BFLOAT16, FLOAT16 = range(4)
BLOCK = 512
"""Elements. Twice as many, a page of each array, are a quarter slower."""
Index = np.uint64
Array = Any
"""What is an ndarray here becomes one of numba's types."""
Raw = tuple[Array, int]
"""The bytes of a tensor, and its kind."""
Numbers = tuple[np.float32, ...]


_njit: Any = functools.partial(numba.njit, nogil=True, error_model="numpy", boundscheck=False)
part: Any = functools.partial(_njit, forceinline=True)


def compiled(function: Callable[..., None]) -> Any:
    """Compile with numba, which keeps the machine code in its cache where it finds a folder to write to."""
    try:
        return _njit(function, cache=True)
    except RuntimeError:
        return _njit(function)


@part
def views(raw: Raw) -> Any:
    """View the bytes as 16-bit and as fp32 elements; the wrong one is not used."""
    wide = raw[0].view(np.float32) if raw[1] == FLOAT32 else np.empty(0, np.float32)
    return raw[0].view(np.uint16), wide


@part
def widen(half: Array, wide: Array, kind: int, start: Index, values: Array, count: Index) -> None:
    """Write ``count`` elements from ``start`` on as fp32 into ``values``."""
    bits = values.view(np.uint32)
    if kind == FLOAT32:
        for i in range(count):
            values[i] = wide[start + i]
    elif kind == BFLOAT16:
        for i in range(count):
            bits[i] = np.uint32(half[start + i]) << np.uint32(16)
    else:
        for i in range(count):
            bits[i] = (np.uint32(half[start + i]) & np.uint32(0x7FFF)) << np.uint32(13)
        for i in range(count):
            values[i] *= np.float32(2.0**112)  # the exponents' biases differ; denormals come out right too
        for i in range(count):
            special = np.uint32(0x7F800000) if bits[i] >= np.uint32(0x47800000) else np.uint32(0)
            bits[i] |= special | (np.uint32(half[start + i]) & np.uint32(0x8000)) << np.uint32(16)


@part
def narrow(
    source: Array, first: Index, half: Array, kind: int, start: Index, scratch: Array, count: Index
) -> None:
    """Cast the bits of fp32 elements from ``first`` on to the kind of ``half``, into it from ``start`` on: to
    the nearest, ties to even; NaN stays NaN.
    """
    if kind == BFLOAT16:
        for i in range(count):
            u = source[first + i]
            rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            quiet = (u >> np.uint32(16)) | np.uint32(0x40)
            half[start + i] = quiet if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded
    elif kind == FLOAT16:
        # Where the result is a denormal, adding 0.5 makes the adder round at its last bit.
        bits = scratch.view(np.uint32)
        for i in range(count):
            bits[i] = source[first + i] & np.uint32(0x7FFFFFFF)
        for i in range(count):
            scratch[i] += np.float32(0.5)
        for i in range(count):
            u = source[first + i] & np.uint32(0x7FFFFFFF)
            normal = (u - np.uint32(0x37FFF001) + ((u >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
            small = bits[i] - np.uint32(0x3F000000)
            large = np.uint32(0x7E00) if u > np.uint32(0x7F800000) else np.uint32(0x7C00)
            finite = small if u < np.uint32(0x38800000) else normal
            magnitude = large if u >= np.uint32(0x47800000) else finite
            half[start + i] = magnitude | ((source[first + i] >> np.uint32(16)) & np.uint32(0x8000))


@compiled
def adam(w: Array, m: Array, v: Array, grad: Raw, out: Raw, coefficients: Numbers) -> None:
    """Step Adam. ``coefficients``: multiplier, L2 factor, 1 - lr * decay, 1 - beta1, 1 - beta2, lr /
    correction1, 1 / sqrt(correction2), eps.
    """
    factor, l2, decay, one_beta1, one_beta2, step_size, root, eps = coefficients
    half, wide = views(grad)
    bits = w.view(np.uint32)
    low = out[0].view(np.uint16)
    g = np.empty(BLOCK, np.float32)
    for block in range(0, w.size, BLOCK):
        s = Index(block)
        count = Index(min(BLOCK, w.size - block))
        widen(half, wide, grad[1], s, g, count)
        for i in range(count):
            x = g[i] * factor + l2 * w[s + i]
            a = m[s + i] + one_beta1 * (x - m[s + i])
            b = v[s + i] + one_beta2 * (x * x - v[s + i])
            m[s + i] = a
            v[s + i] = b
            w[s + i] = w[s + i] * decay - step_size * a / (np.sqrt(b) * root + eps)
        narrow(bits, s, low, out[1], s, g, count)


@compiled
def sgd(w: Array, buffer: Array, grad: Raw, out: Raw, coefficients: Numbers) -> None:
    """Step SGD. ``coefficients``: multiplier, L2 factor, lr, momentum, kept part of the gradient, what the
    update takes of the gradient and of the buffer. An empty buffer: no momentum.
    """
    factor, l2, lr, momentum, kept, own, carried = coefficients
    half, wide = views(grad)
    bits = w.view(np.uint32)
    low = out[0].view(np.uint16)
    g = np.empty(BLOCK, np.float32)
    for block in range(0, w.size, BLOCK):
        s = Index(block)
        count = Index(min(BLOCK, w.size - block))
        widen(half, wide, grad[1], s, g, count)
        if buffer.size == 0:
            for i in range(count):
                w[s + i] -= lr * (g[i] * factor + l2 * w[s + i])
        else:
            for i in range(count):
                x = g[i] * factor + l2 * w[s + i]
                b = momentum * buffer[s + i] + kept * x
                buffer[s + i] = b
                w[s + i] -= lr * (own * x + carried * b)
        narrow(bits, s, low, out[1], s, g, count)


@compiled
def lion(w: Array, m: Array, grad: Raw, out: Raw, coefficients: Numbers) -> None:
    """Step Lion. ``coefficients``: multiplier, weight decay, lr, 1 - beta1, 1 - beta2."""
    factor, decay, lr, one_beta1, one_beta2 = coefficients
    half, wide = views(grad)
    bits = w.view(np.uint32)
    low = out[0].view(np.uint16)
    g = np.empty(BLOCK, np.float32)
    for block in range(0, w.size, BLOCK):
        s = Index(block)
        count = Index(min(BLOCK, w.size - block))
        widen(half, wide, grad[1], s, g, count)
        for i in range(count):
            change = g[i] * factor - m[s + i]
            c = m[s + i] + one_beta1 * change
            sign = np.float32(c > 0) - np.float32(c < 0)
            w[s + i] -= lr * (sign + decay * w[s + i])
            m[s + i] += one_beta2 * change
        narrow(bits, s, low, out[1], s, g, count)


def ready(name: str) -> Any:
    """Return the kernel of that name after a call without elements: what can fail has failed by then."""
    function, states, coefficients = {"adam": (adam, 3, 8), "sgd": (sgd, 2, 7), "lion": (lion, 2, 5)}[name]
    raw = np.empty(0, np.uint8), NONE
    function(*[np.empty(0, np.float32)] * states, raw, raw, (np.float32(1),) * coefficients)
    return function
