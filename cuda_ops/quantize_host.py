"""Block quantisation on the CPU by numba's kernels: whole blocks over threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch import Tensor

from . import host, quantize_twins


@functools.cache
def kernels() -> Any:
    """Return the module of numba's kernels, compiled or from their cache; None without a numba that works."""
    try:
        from . import quantize_host_kernels

        quantize_host_kernels.compile_all()
    except Exception:  # not only ImportError: numba refuses versions that it does not know
        return None
    return quantize_host_kernels


def wanted(tensor: Tensor) -> bool:
    """Tell whether ``tensor``, fp32, bf16 or fp16, belongs here, and not to the twins."""
    return host.wanted(tensor) and kernels() is not None


def quantize(
    values: Tensor, error: Tensor | None, packed: Tensor, bits: int, block: int, beta: float
) -> None:
    """Quantise blocks, of ``values + error`` if there is an error, which is then updated."""
    codes, scales = (tensor.numpy() for tensor in quantize_twins.split(packed, values.numel(), bits))
    given, kind = host.raw(values)
    old, error_kind = host.raw(error)
    error_size = 0 if error is None else error.itemsize
    numbers = np.float32(beta), np.float32(1 - beta)

    def with_numba(start: int, stop: int) -> None:
        first = start // block  # chunks need not begin with a block
        last = stop // block
        a = first * block
        z = last * block
        kernels().quantize(
            (given[a * values.itemsize : z * values.itemsize], kind),
            (old[a * error_size : z * error_size], error_kind),
            codes[a * bits // 8 : z * bits // 8],
            scales[first:last],
            block,
            bits,
            numbers,
        )

    host.in_chunks(with_numba, values.numel(), values.numel())


def dequantize_sum(packed_rows: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Write the sum of what the rows stand for."""
    found, kind = host.raw(out)
    packed = packed_rows.view(-1).numpy()

    def with_numba(start: int, stop: int) -> None:
        first = start // block
        last = stop // block
        kernels().dequantize_sum(packed, len(packed_rows), (found, kind), first, last, block, bits)

    host.in_chunks(with_numba, out.numel(), out.numel())
