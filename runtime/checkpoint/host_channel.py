"""Exchanges messages between the hosts of the ranks, beside all other collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Pending, Work, exchange_objects
from ..comm.waits import waits

_TIMEOUT = timedelta(hours=12)
"""Limits an exchange: one rank may write to a slow disk for long while the others wait."""


class HostChannel:
    """Runs small collectives over a separate gloo group, whatever the device is; any thread may use it."""

    def __init__(self, comm: Comm) -> None:
        """Make the group. Collective."""
        self._world_size, self._number = comm.world_size, comm.number
        self._group: Any = None
        if self._world_size > 1:
            self._group = comm.new_group(range(self._world_size), backend="gloo", timeout=_TIMEOUT)

    def exchange(self, value: object) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order."""
        key = waits.next_key(self._number, "host")
        return exchange_objects(
            value, self._world_size, self._group, key, "agrees in the background", over_gloo=True
        )

    def send(self, piece: Tensor, rank: int) -> Pending:
        """Begin to send a tensor of the host to another rank, which begins to receive it."""
        work = dist.isend(piece, dist.get_global_rank(self._group, rank), group=self._group)
        return Work(work, waits.next_key(self._number, "host"), "sends in the background", piece)

    def receive(self, piece: Tensor, rank: int) -> Pending:
        """Begin to fill a tensor of the host with what another rank sends."""
        work = dist.irecv(piece, dist.get_global_rank(self._group, rank), group=self._group)
        return Work(work, waits.next_key(self._number, "host"), "receives in the background", piece)

    def any(self, *flags: bool) -> list[bool]:
        """Tell for each flag whether it is set on any rank."""
        return [any(column) for column in zip(*self.exchange(flags), strict=True)]
