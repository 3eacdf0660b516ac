"""A communicator of one process that stands for rank 0 of two, and writes down what it is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zlaunch.runtime.comm.collectives import Comm
from zlaunch.runtime.comm.link import RankLink
from zlaunch.runtime.comm.pending import Pending
from zlaunch.runtime.mesh import MeshShape


class Late(Pending):
    """Does its work when somebody waits for it, as a collective does."""

    def __init__(self, comm: FakeComm, name: str, work: Callable[[], object]) -> None:
        self._comm, self._name, self._work = comm, name, work
        comm.log.append(f"start {name}")
        comm.in_flight += 1
        comm.most_in_flight = max(comm.most_in_flight, comm.in_flight)

    def wait(self) -> None:
        self._comm.log.append(f"wait {self._name}")
        self._comm.in_flight -= 1
        self._work()


class FakeComm(Comm):
    """Rank 0 of two ranks. The other one has equal parameters, and ``other`` as every gradient."""

    def __init__(self, *, other: float = 0.0) -> None:
        self.device, self.world_size, self.rank = torch.device("cpu"), 2, 0
        self.other, self.log, self.in_flight, self.most_in_flight = other, [], 0, 0
        self._labels: list[str] = []
        self.experts, self.mesh = None, MeshShape(2)
        self.link = self.data = RankLink(self.device, 2, 0, None, None)
        self.shards: dict[int, Tensor] = {}
        """Keeps the other rank's shard of each label."""

    log: list[str]

    def label(self, name: str, link: RankLink) -> int:
        self._labels.append(name)
        return len(self._labels) - 1

    def broadcast(self, tensor: Tensor, source: int = 0, among: RankLink | None = None) -> None:
        if tensor.is_floating_point() and tensor.numel() > 1:  # a unit's first values: the other's half
            self.shards[len(self._labels) - 1] = tensor.chunk(2)[1].clone()

    def all_gather(self, full: Tensor, source: Tensor, label: int = 0, rounded: bool = False) -> Pending:
        own, other = full.chunk(2)
        own.copy_(source)
        return Late(self, f"gather {self._labels[label]}", lambda: other.copy_(self.shards[label]))

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int = 0) -> Pending:
        return Late(
            self, f"reduce {self._labels[label]}", lambda: shard.copy_(bucket.chunk(2)[0] + self.other)
        )

    def all_reduce(self, tensor: Tensor, label: int = 0) -> Pending:
        return Late(self, f"reduce {self._labels[label]}", lambda: tensor.add_(self.other))

    def drain(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a unit or a reducer is not expected to use Comm.{name}")
