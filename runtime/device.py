"""Names the parts of a step for torch's profiler, marks its streams, and copies numbers from the device
without a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

# -- profiler ---------------------------------------------------------------------------------------


def named(name: str) -> AbstractContextManager[Any]:
    """Return a context whose work torch's profiler shows as ``zlaunch::NAME``. Without a profiler it costs
    nothing.
    """
    return record_function(f"zlaunch::{name}") if is_profiled() else nullcontext()


def is_profiled() -> bool:
    """Tell whether torch's profiler is on."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]  # it is there, not exported


# -- order of streams -------------------------------------------------------------------------------


def stream_mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind everything that the current stream has queued; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def keep_for_stream(tensor: Tensor) -> Tensor:
    """Return a tensor of a pass, whose memory stays until the current stream has used it: the script may run
    its passes on another stream than its steps.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


# -- small copies -----------------------------------------------------------------------------------
#
# Copies a few numbers to a device without a wait of the host.


def all_on(numbers: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return 0-dim tensors on the device, in their order; copy those of the host there at once."""
    away = [number for number in numbers if number.device.type != device.type]
    if not away:
        return numbers
    moved = iter(to_device(torch.stack(away), device).unbind())
    return [number if number.device.type == device.type else next(moved) for number in numbers]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor's copy that the host does not wait for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# -- host copy --------------------------------------------------------------------------------------
#
# Copies a step's numbers from the device to the host without a wait.


class HostCopy:
    """Holds the numbers of one step as they are now; those on a GPU are being copied to the host."""

    def __init__(self, numbers: Sequence[float | Tensor] | Tensor) -> None:
        """Start the copy: one for all that is on a GPU, in float64, on the present stream. ``numbers`` are
        floats and tensors of one element, or one tensor (n,).
        """
        self._event: torch.cuda.Event | None = None
        away: Tensor | None = None
        if isinstance(numbers, Tensor):
            self._here: list[float | None] = [None] * len(numbers) if numbers.is_cuda else numbers.tolist()
            if numbers.is_cuda:
                away = numbers.detach().double()
        else:
            self._here = [None if isinstance(n, Tensor) and n.is_cuda else float(n) for n in numbers]
            there = [n.detach().reshape(()).double() for n in numbers if isinstance(n, Tensor) and n.is_cuda]
            if there:
                away = torch.stack(there)
        if away is not None:
            self._copied = torch.empty(len(away), dtype=torch.float64, pin_memory=True)
            self._copied.copy_(away, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._event.record()

    @property
    def is_done(self) -> bool:
        """Tell whether nothing had to be copied."""
        return self._event is None

    @property
    def has_arrived(self) -> bool:
        """Tell whether :meth:`read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]  # torch's own

    def read(self) -> list[float]:
        """Return all numbers, in their order; wait for the copy if it is still under way."""
        if self._event is not None:
            self._event.synchronize()
        copied = iter([] if self._event is None else self._copied.tolist())
        return [next(copied) if number is None else number for number in self._here]
