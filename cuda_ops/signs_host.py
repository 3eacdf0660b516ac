"""Compression to signs on the CPU by numba's kernels: whole blocks over threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch import Tensor

from . import host, signs_twins

_BLOCK = 256


@functools.cache
def kernels() -> Any:
    """Return the module of numba's kernels, compiled or from their cache; None without a numba that works."""
    try:
        from . import signs_host_kernels

        signs_host_kernels.compile_all()
    except Exception:  # not only ImportError: numba refuses versions that it does not know
        return None
    return signs_host_kernels


def compress(values: Tensor, packed: Tensor) -> None:
    """Pack signs; leave in ``values`` what that loses."""
    bits, scales = (tensor.numpy() for tensor in signs_twins.split(packed, values.numel()))
    flat = values.numpy()

    def with_numba(start: int, stop: int) -> None:
        first, last = start // _BLOCK, stop // _BLOCK  # chunks need not begin with a block
        a, z = first * _BLOCK, last * _BLOCK
        kernels().compress(flat[a:z], bits[a // 8 : z // 8], scales[first:last])

    host.in_chunks(with_numba, values.numel(), values.numel())


def expand(packed_rows: Tensor, out: Tensor, factor: float) -> None:
    """Write ``factor`` times the sum of what the rows stand for."""
    flat, packed = out.numpy(), packed_rows.view(-1).numpy()

    def with_numba(start: int, stop: int) -> None:
        first, last = start // _BLOCK, stop // _BLOCK
        kernels().expand(packed, len(packed_rows), flat, first, last, np.float32(factor))

    host.in_chunks(with_numba, out.numel(), out.numel())
