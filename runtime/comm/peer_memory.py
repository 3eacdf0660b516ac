"""Defines memory that CPU ranks share, through which collectives may go instead of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .pending import Exchange, Pending

Identity = tuple[int, int]
"""Identifies a collective: the number of a label; the elements of a rank's part, times 16, plus the bytes of
one element.
"""


class PeerMemory(Protocol):
    """Gives memory that all ranks see, and runs collectives through it. ``Comm`` describes every method."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor: ...
    def release(self, storage: torch.UntypedStorage) -> bool: ...
    def all_gather(self, channel: int, full: Tensor, source: Tensor, label: int = 0) -> Pending: ...
    def reduce_scatter(self, channel: int, shard: Tensor, bucket: Tensor, label: int = 0) -> Pending: ...
    def all_reduce(self, channel: int, tensor: Tensor, label: int = 0) -> Pending: ...
    def progress(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class Connect(Protocol):
    """Makes a PeerMemory, or returns None on every rank where the ranks cannot share memory. Collective."""

    def __call__(
        self,
        rank: int,
        world_size: int,
        exchange: Exchange,
        timeout_s: float,
        allowed: bool,
        describe: Callable[[int, Identity], str],
        check: Callable[[], None],
        first: int = 0,
    ) -> PeerMemory | None: ...
