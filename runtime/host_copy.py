"""Copies a step's numbers from the device to the host without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Holds the numbers of one step as they are now; those on a GPU are being copied to the host."""

    def __init__(self, numbers: Sequence[float | Tensor]) -> None:
        """Start the copy: one for all tensors of one element on a GPU, in float64, on the present stream."""
        away = [n.detach().reshape(()).double() for n in numbers if isinstance(n, Tensor) and n.is_cuda]
        self._here = [None if isinstance(n, Tensor) and n.is_cuda else float(n) for n in numbers]
        self._event: torch.cuda.Event | None = None
        if away:
            self._copied = torch.empty(len(away), dtype=torch.float64, pin_memory=True)
            self._copied.copy_(torch.stack(away), non_blocking=True)
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
