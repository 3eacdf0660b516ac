"""Compression to signs on the CPU by numba's kernels: whole blocks over threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from . import host, signs_twins

_BLOCK = 256
_PIECE = 1 << 17
"""Elements that are added up and compressed while they are in the cache; a multiple of a block."""


@functools.cache
def kernels() -> Any:
    """Return the module of numba's kernels, compiled or from their cache; None without a numba that works."""
    try:
        from . import signs_host_kernels

        signs_host_kernels.compile_all()
    except Exception:  # not only ImportError: numba refuses versions that it does not know
        return None
    return signs_host_kernels


def compress(values: Tensor, packed: Tensor, addend: Tensor | None, alpha: float) -> None:
    """Pack signs; leave in ``values`` what that loses."""
    bits, scales = (tensor.numpy() for tensor in signs_twins.split(packed, values.numel()))
    flat = values.numpy()

    def with_numba(start: int, stop: int) -> None:
        for a, z in _pieces(start, stop):
            if addend is not None:
                values[a:z].add_(addend[a:z], alpha=alpha)
            kernels().compress(flat[a:z], bits[a // 8 : z // 8], scales[a // _BLOCK : z // _BLOCK])

    host.in_chunks(with_numba, values.numel(), values.numel())


def expand(packed_rows: Tensor, out: Tensor, factor: float, into: Tensor | None, alpha: float) -> None:
    """Write ``factor`` times the sum of what the rows stand for; add it to ``into``."""
    flat = out.numpy()
    packed = packed_rows.view(-1).numpy()

    def with_numba(start: int, stop: int) -> None:
        for a, z in _pieces(start, stop):
            kernels().expand(packed, len(packed_rows), flat, a // _BLOCK, z // _BLOCK, np.float32(factor))
            if into is not None:
                into[a:z].add_(out[a:z], alpha=alpha)

    host.in_chunks(with_numba, out.numel(), out.numel())


def frozen_adam(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, momentum: Tensor, numbers: Sequence[float]
) -> None:
    """Step Adam with a variance that stays as it is. ``numbers``: lr, weight decay, eps."""
    arrays = [tensor.detach().numpy() for tensor in (master, exp_avg, exp_avg_sq, momentum)]
    narrow = tuple(map(np.float32, numbers))

    def with_numba(start: int, stop: int) -> None:
        kernels().frozen_adam(*[array[start:stop] for array in arrays], *narrow)

    host.in_chunks(with_numba, master.numel(), master.numel())


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of a chunk that stay in the cache; chunks begin with a block."""
    for low in range(start, stop, _PIECE):
        yield low, min(low + _PIECE, stop)
