"""The optimizer steps on the CPU: chunks over threads, by numba's kernels or, without numba, by the twins.

Either way a chunk stays in the cache from its first operation to its last. Arguments are those of ``step``.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import loader, twins
from .arguments import AdamArgs, LionArgs, Scalar, SgdArgs, StepArgs, on_host

_CHUNK = 1 << 20
"""Elements that the twins take at a time: less costs more in Python than it gains in the cache."""
_ALIGN = 1 << 16
"""Elements. Chunks begin at multiples of it, so that no bit depends on the number of threads."""
_CHUNKS_A_THREAD = 4
"""So that threads that are held up do less."""


def wanted(tensor: Tensor) -> bool:
    """Tell whether steps on ``tensor`` belong here, and not to the plain twins."""
    return tensor.device.type == "cpu" and loader.mode() != "torch"


@functools.cache
def kernel(name: str) -> Any:
    """Return numba's kernel, compiled or from its cache, or None without a numba that works."""
    try:
        from . import host_kernels

        return host_kernels.ready(name)
    except Exception:  # not only ImportError: numba refuses versions that it does not know
        return None


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: AdamArgs,
) -> None:
    """Step Adam or AdamW."""
    if (given := on_host(args)) is None:
        return
    step = float(step)
    multiplier = float(given.multiplier)
    if out is None and grad.dtype == torch.float32 and multiplier != 0:
        # what torch.optim does, to the bit
        twins.fused_adam(master, exp_avg, exp_avg_sq, grad, step, given, divisor=1 / multiplier)
        return
    coefficients = adam_numbers(given, step)
    _run("adam", (master, exp_avg, exp_avg_sq), grad, out, coefficients, twins.adam, step, given)


def adam_numbers(given: AdamArgs, step: float) -> tuple[float, ...]:
    """Return the coefficients of numba's kernel; the arguments are plain numbers."""
    lr = float(given.lr)
    decay = given.weight_decay
    first, second = given.corrections(step)
    return (
        float(given.multiplier),
        0.0 if given.decoupled else decay,
        1 - lr * decay if given.decoupled else 1.0,
        1 - given.beta1,
        1 - given.beta2,
        lr / first,
        1 / math.sqrt(second),
        given.eps,
    )


def sgd(
    master: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    out: Tensor | None,
    step: Scalar,
    args: SgdArgs,
) -> None:
    """Step SGD."""
    if (given := on_host(args)) is None:
        return
    step = float(step)
    if step == 1 and momentum_buffer is not None:
        momentum_buffer.zero_()  # whatever it held, NaN times 0 is NaN
    _run("sgd", (master, momentum_buffer), grad, out, sgd_numbers(given, step), twins.sgd, step, given)


def sgd_numbers(given: SgdArgs, step: float) -> tuple[float, ...]:
    """Return the coefficients of numba's kernel; the arguments are plain numbers."""
    first = step == 1
    return (
        float(given.multiplier),
        given.weight_decay,
        float(given.lr),
        0.0 if first else given.momentum,
        1.0 if first else 1 - given.dampening,
        1.0 if given.nesterov else 0.0,
        given.momentum if given.nesterov else 1.0,
    )


def lion(master: Tensor, exp_avg: Tensor, grad: Tensor, out: Tensor | None, args: LionArgs) -> None:
    """Step Lion."""
    if (given := on_host(args)) is None:
        return
    _run("lion", (master, exp_avg), grad, out, lion_numbers(given), twins.lion, given)


def lion_numbers(given: LionArgs) -> tuple[float, ...]:
    """Return the coefficients of numba's kernel; the arguments are plain numbers."""
    rates = 1 - given.beta1, 1 - given.beta2
    return float(given.multiplier), given.weight_decay, float(given.lr), *rates


def _run(
    name: str,
    state: Sequence[Tensor | None],
    grad: Tensor,
    out: Tensor | None,
    coefficients: Sequence[float],
    twin: Callable[..., None],
    *numbers: float | StepArgs,
) -> None:
    """Run the kernel, or else the twin with ``numbers``, on chunks of the flat tensors."""
    compiled = kernel(name)
    if compiled is None:
        flat = [*state, grad, out]

        def with_torch(start: int, stop: int) -> None:
            with torch.no_grad():  # which each thread has for itself
                twin(*(None if tensor is None else tensor[start:stop] for tensor in flat), *numbers)

        in_chunks(with_torch, grad.numel(), _CHUNK)
        return
    arrays = [np.empty(0, np.float32) if tensor is None else tensor.detach().numpy() for tensor in state]
    given, kind = raw(grad)
    result, out_kind = raw(out)
    values = tuple(map(np.float32, coefficients))

    def with_numba(start: int, stop: int) -> None:
        gradient = given[start * grad.itemsize : stop * grad.itemsize], kind
        cast = result[start * 2 : stop * 2], out_kind
        compiled(*[array[start:stop] for array in arrays], gradient, cast, values)

    in_chunks(with_numba, grad.numel(), grad.numel())


def raw(tensor: Tensor | None) -> tuple[Any, int]:
    """Return the bytes of a tensor and the kernels' name for its dtype."""
    if tensor is None:
        return np.empty(0, np.uint8), 0
    kind = (torch.float32, torch.bfloat16, torch.float16).index(tensor.dtype) + 1
    return tensor.detach().view(torch.uint8).numpy(), kind


def in_chunks(function: Callable[[int, int], None], numel: int, limit: int) -> None:
    """Call ``function(start, stop)`` for chunks of at most ``limit`` elements, in the pool's threads."""
    threads = torch.get_num_threads()
    share = -(-numel // (threads * _CHUNKS_A_THREAD * _ALIGN)) * _ALIGN
    starts = range(0, numel, chunk := max(min(share, limit), _ALIGN))
    if len(starts) <= 1:
        if numel:
            function(0, numel)
        return
    remaining = iter(starts)

    def work() -> None:
        for start in remaining:
            function(start, min(start + chunk, numel))

    pool = _pool(threads)
    for future in [pool.submit(work) for _ in range(threads)]:
        future.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads in which torch runs operations serially; the threads of others stay as they are."""
    started = threading.Barrier(threads + 1)

    def serial() -> None:
        torch.get_num_threads()  # a thread's first look at the number sets it to the process's
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "zlaunch-step", serial)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # the latest call is also what threads made later begin with
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has the pool, but not its threads
