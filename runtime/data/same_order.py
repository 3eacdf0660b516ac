"""Finds out whether all ranks see the same order of samples, without waiting for any of them.

Ranks share out one order. Where each has another, that of its own shard or of an unseeded shuffle, samples
would be left out and others come twice, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_PREFIX = "zlaunch-order"


def digest(sample: Any) -> int:
    """Return a number that identifies a sample: 63 bits of a hash of its contents.

    An object of a class that is not known here counts by its class alone.
    """
    found = blake2b(digest_size=8)
    _add(sample, found.update)
    return int.from_bytes(found.digest(), "big") >> 1


def _add(value: Any, add: Callable[[Any], None]) -> None:
    add(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        add(f"{value.dtype}{tuple(value.shape)}".encode())
        add(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, numpy.ndarray):
        add(f"{value.dtype}{value.shape}".encode())
        add(value.tobytes())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _add(key, add)
            _add(each, add)
    elif isinstance(value, Set):  # in an order that does not differ between processes
        for each in sorted(map(repr, value)):
            add(each.encode())
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(each, add)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            _add(getattr(value, each.name), add)
    elif isinstance(value, (str, bytes, int, float, complex, numpy.generic)) or value is None:
        add(repr(value).encode())


class SameOrder:
    """Compares a note of this rank's with rank 0's, which that leaves in the store of the process group.

    Nobody waits: a script may read a batch on one rank alone, to look at it. A rank asks at each batch until
    rank 0's note of the same epoch is there.
    """

    def __init__(self, key: str | None, rank: int) -> None:
        """``key`` names the loader among all of this world, alike on all ranks; None compares nothing.
        ``rank`` is the data-parallel one.
        """
        self._key = key
        self._rank = rank
        self._settled = key is None or not dist.is_initialized()

    def check(self, epoch: int, note: int) -> bool:
        """Return False if rank 0 has another note."""
        if self._settled:
            return True
        store = PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        key = f"{self._key}/{epoch}"
        if self._rank == 0:
            store.set(key, str(note))
            self._settled = True
            return True
        if not store.check([key]):
            return True
        self._settled = True
        return int(store.get(key)) == note

    def next_epoch(self) -> None:
        """Let rank 0 leave its note of the next epoch, too: the others may not have seen the last one's."""
        if self._rank == 0 and self._key is not None:
            self._settled = not dist.is_initialized()
