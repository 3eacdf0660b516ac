"""Measures how much memory and disk one rank may take."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ..offload.manager import OffloadOptions
from .estimate import Amounts
from .host import host_bytes

PINNED_SHARE = 0.8
"""The share of the free host memory that may be page-locked: no other process can use such memory."""


def available(device: torch.device, offload: OffloadOptions, local_world_size: int) -> Amounts:
    """Return the free bytes for one of ``local_world_size`` ranks on this machine.

    ``disk`` is what the optimizer's drive has, else the parameters' drive; 0 where no path is given.
    """
    free = 0
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    path = offload.optimizer_path or offload.parameters_path
    return Amounts(
        device=free,
        host=host_bytes() // local_world_size,
        disk=_free_on(path) // local_world_size if path else 0,
    )


def other_drive_bytes(offload: OffloadOptions, local_world_size: int) -> int | None:
    """Return the free bytes for the parameters where their drive is not the optimizer's, else None."""
    one, other = offload.optimizer_path, offload.parameters_path
    if not one or not other or os.stat(_existing(one)).st_dev == os.stat(_existing(other)).st_dev:
        return None
    return _free_on(other) // local_world_size


def _existing(path: str) -> Path:
    folder = Path(os.path.expanduser(path)).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_on(path: str) -> int:
    return shutil.disk_usage(_existing(path)).free
