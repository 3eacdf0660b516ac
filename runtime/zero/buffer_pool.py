"""Lends the memory that gradients are sent from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.collectives import Comm


class BufferPool:
    """Keeps send buffers. Ordinary memory is released after each pass; shared memory cannot be."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.free: list[Tensor] = []

    def lend(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return a flat tensor of ``numel`` elements, part of the smallest free buffer large enough."""
        fitting = [i for i, t in enumerate(self.free) if t.dtype == dtype and t.numel() >= numel]
        if not fitting:
            return self._comm.empty(numel, dtype)
        return self.free.pop(min(fitting, key=lambda i: self.free[i].numel()))[:numel]

    def give_back(self, tensor: Tensor) -> None:
        self.free.append(tensor if tensor._base is None else tensor._base)

    def end_pass(self) -> None:
        if not self._comm.shared:
            self.free.clear()
