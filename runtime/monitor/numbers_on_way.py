"""Copies a step's numbers from the device to the host without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor


class NumbersOnWay:
    """Holds 0-dim tensors and floats of one step; on a GPU the tensors are being copied to the host."""

    def __init__(self, numbers: Sequence[float | Tensor]) -> None:
        """Start the copy: one for all tensors, in float64, on the present stream."""
        self._numbers = [number.detach() if isinstance(number, Tensor) else number for number in numbers]
        self._event: torch.cuda.Event | None = None
        there = [number.detach().reshape(()).double() for number in numbers if _is_away(number)]
        if there:
            self._copied = torch.empty(len(there), dtype=torch.float64, pin_memory=True)
            self._copied.copy_(torch.stack(there), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._event.record()

    @property
    def are_here(self) -> bool:
        """Tell whether nothing is being copied."""
        return self._event is None

    def read(self) -> list[float]:
        """Return all numbers, in their order; wait for the copy if it is still under way."""
        if self._event is not None:
            self._event.synchronize()
        copied = iter([] if self._event is None else self._copied.tolist())
        return [next(copied) if _is_away(number) else float(number) for number in self._numbers]


def _is_away(number: float | Tensor) -> TypeGuard[Tensor]:
    return isinstance(number, Tensor) and number.device.type == "cuda"
