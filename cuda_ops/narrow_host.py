"""Steps with narrow states and masters on the CPU: chunks over threads, by numba's kernels or the twins."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import host, narrow_twins
from .arguments import AdamArgs, LionArgs, Scalar, SgdArgs, on_host
from .narrow_state import BLOCK, tables
from .narrow_twins import States

_CHUNK = 1 << 18
"""Elements that the twins take at a time, a multiple of :data:`BLOCK`."""
_CODES = 4


@functools.cache
def kernel(name: str) -> Any:
    """Return numba's kernel, compiled or from its cache, or None without a numba that works."""
    try:
        from . import narrow_host_kernels

        return narrow_host_kernels.ready(name)
    except Exception:  # as in ``host``
        return None


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
    """Step; arguments as in ``narrow_step``."""
    if (given := on_host(args)) is None:
        return
    count = float(count)
    if isinstance(given, AdamArgs):
        name = "adam"
        numbers = host.adam_numbers(given, count)
    elif isinstance(given, SgdArgs):
        name = "sgd"
        numbers = host.sgd_numbers(given, count)
        if count == 1:
            for kept in (tensor for pair in states for tensor in pair if tensor is not None):
                kept.zero_()  # whatever it held, NaN times 0 is NaN
    else:
        name = "lion"
        numbers = host.lion_numbers(given)
    compiled = kernel(name)

    def with_torch(start: int, stop: int) -> None:
        with torch.no_grad():  # which each thread has for itself
            part = [(kept[start:stop], _scales(scale, start, stop)) for kept, scale in states]
            narrow = None if out is None else out[start:stop]
            narrow_twins.step(
                master[start:stop], part, grad[start:stop], narrow, count, given, key, place + start
            )

    if compiled is None:
        host.in_chunks(with_torch, grad.numel(), _CHUNK)
        return
    raws = [host.raw(tensor) for tensor in (master, grad, out)]
    raw_states = [_raw_state(values, scale) for values, scale in states]
    raw_states += [(np.empty(0, np.uint8), 0, np.empty(0, np.float32))] * (2 - len(raw_states))
    coefficients = tuple(map(np.float32, numbers))
    maps = tables(torch.device("cpu")).numpy()
    lookup = _lookup()
    seed = int(narrow_twins.mixed(narrow_twins.mixed(torch.tensor(int(count) & 0xFFFFFFFF)) ^ key))

    def with_numba(start: int, stop: int) -> None:
        flat = [(data[start * n : stop * n], kind) for (data, kind), n in zip(raws, widths, strict=True)]
        narrow = [
            (data[start * n : stop * n], kind, scale[start // BLOCK : -(-stop // BLOCK)])
            for (data, kind, scale), n in zip(raw_states, state_widths, strict=True)
        ]
        compiled(*flat, *narrow, coefficients, maps, lookup, np.uint32(seed), np.int64(place + start))

    widths = [master.itemsize, grad.itemsize, 2]
    state_widths = [_WIDTHS[kind] for _, kind, _ in raw_states]
    host.in_chunks(with_numba, grad.numel(), grad.numel())


_WIDTHS = (0, 4, 2, 2, 1)


def _raw_state(values: Tensor, scale: Tensor | None) -> tuple[Any, int, Any]:
    """Return a state's bytes, the kernels' name for its dtype, and its scales."""
    if values.dtype != torch.uint8:
        return *host.raw(values), np.empty(0, np.float32)
    assert scale is not None
    return values.detach().numpy(), _CODES, scale.detach().view(-1).numpy()


def _scales(scale: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if scale is None else scale[start // BLOCK : -(-stop // BLOCK)]


@functools.cache
def _lookup() -> Any:
    """Return for both maps, by the upper 16 bits of a number, the least code of the numbers that begin with
    them: (2, 65536) of uint8. The code of a number is that or the next one, since no two bounds begin alike.
    """
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    least = np.where(upper >> np.uint32(31), upper | np.uint32(0xFFFF), upper).astype(np.uint32)
    numbers = np.nan_to_num(least.view(np.float32), nan=0.0)
    found = [np.searchsorted(bounds[:-1], numbers) for bounds in tables(torch.device("cpu")).numpy()[1::2]]
    return np.stack(found).astype(np.uint8)
