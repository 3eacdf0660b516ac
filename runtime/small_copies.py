"""Copies a few numbers to a device without a wait of the host."""

from __future__ import annotations

import torch
from torch import Tensor


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
