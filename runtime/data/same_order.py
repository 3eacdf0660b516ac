"""Finds out whether all ranks see the same order of samples, without waiting for any of them.

Each rank takes its share of one order. If the ranks read different orders, because of their own shards or an
unseeded shuffle, some samples are never read and others are read twice.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping, Set
from hashlib import blake2b
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_PREFIX = "zlaunch-order"
_DEEPEST = 8


def digest(value: Any) -> int:
    """Return a number that identifies samples or indices: 63 bits of a hash of the contents.

    An object of a class that is not known here counts by what it has in ``tobytes()`` or its attributes, or
    by its class alone.
    """
    found = blake2b(digest_size=8)
    _add(value, found.update, 0)
    return int.from_bytes(found.digest(), "big") >> 1


class Digest:
    """Identifies the contents of many samples in their order, faster than :func:`digest` does."""

    def __init__(self) -> None:
        self._found = blake2b(digest_size=8)

    def add(self, sample: Any) -> None:
        """Take the next sample."""
        if isinstance(sample, Mapping):
            for key, each in sample.items():
                self._add_part(key)
                self._add_part(each)
        else:
            self._add_part(sample)

    def _add_part(self, value: Any) -> None:
        try:
            # The second format has no references, whose places depend on who else holds a value.
            self._found.update(marshal.dumps(value, 2))
        except ValueError:  # no plain value, nor one that has its bytes
            _add(value, self._found.update, 0)

    def value(self) -> int:
        """Return the number: 63 bits."""
        return int.from_bytes(self._found.digest(), "big") >> 1


def _add(value: Any, add: Callable[[Any], None], depth: int) -> None:
    add(type(value).__name__.encode())
    if depth > _DEEPEST:
        return
    if isinstance(value, torch.Tensor):
        _add_tensor(value, add)
    elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        _add(value.tolist(), add, depth + 1)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _add(key, add, depth + 1)
            _add(each, add, depth + 1)
    elif isinstance(value, Set):  # in an order that does not differ between processes
        for each in sorted(map(repr, value)):
            add(each.encode())
    elif isinstance(value, (list, tuple, range)):
        add(str(len(value)).encode())
        for each in value:
            _add(each, add, depth + 1)
    elif isinstance(value, (str, bytes, int, float, complex, numpy.generic)) or value is None:
        add(repr(value).encode())
    elif callable(in_bytes := getattr(value, "tobytes", None)):  # an array, an image
        add(str(getattr(value, "shape", "")).encode())
        add(in_bytes())
    elif hasattr(value, "__dict__") and not callable(value):
        _add(vars(value), add, depth + 1)


def _add_tensor(value: torch.Tensor, add: Callable[[Any], None]) -> None:
    add(f"{value.dtype}{tuple(value.shape)}".encode())
    try:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        add(plain.view(-1).view(torch.uint8).numpy().data)
    except (RuntimeError, NotImplementedError, TypeError):  # sparse or nested: by its type and shape
        return


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
        try:
            return self._compare(f"{self._key}/{epoch}", note)
        except dist.DistError:  # rank 0, which has the store, has ended
            self._settled = True
            return True

    def _compare(self, key: str, note: int) -> bool:
        store = PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        if self._rank == 0:
            store.set(key, str(note))
        elif not store.check([key]):
            return True
        self._settled = True
        return self._rank == 0 or int(store.get(key)) == note

    def next_epoch(self) -> None:
        """Compare anew: an order may differ in a later epoch only."""
        self._settled = self._key is None or not dist.is_initialized()
