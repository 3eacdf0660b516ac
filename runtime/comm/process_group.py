"""Process groups that end without holding up the threads they wait for."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_backends: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""The gloo part of each group, which goes after the group itself."""


def new_group(world_size: int, **options: Any) -> dist.ProcessGroup:
    """Make a group of all ranks. Collective."""
    group = dist.new_group(list(range(world_size)), **options)
    assert isinstance(group, dist.ProcessGroup)
    ends_well(group)
    return group


def ends_well(group: dist.ProcessGroup | None) -> None:
    """Let the group end safely right after a collective.

    Gloo's end waits for its threads, one of which may be about to free the collective's tensors, for which
    it needs the interpreter's lock. In torch 2.6 a group keeps that lock when it takes its gloo part with it;
    that part gives it up when it goes by itself.
    """
    if group is not None and _CPU in group._device_types:
        _backends[group] = group._get_backend(_CPU)
