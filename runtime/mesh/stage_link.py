"""Runs collectives of units of which this rank's part of a pipeline may have nothing."""

from __future__ import annotations

from torch import Tensor

from ..comm.link import Note, RankLink
from ..comm.pending import DONE, Pending


class StageLink(RankLink):
    """Is a link whose collectives of nothing are done: units of layers that other stages have are empty."""

    def __init__(self, link: RankLink) -> None:
        super().__init__(link.device, link.size, link.position, link.gather_group, link.reduce_group)

    def all_gather(
        self, full: Tensor, source: Tensor, label: int, note: Note, rounded: bool = False
    ) -> Pending:
        """Start to fill ``full`` from every member's ``source``."""
        return super().all_gather(full, source, label, note, rounded) if full.numel() else DONE

    def reduce_scatter(self, shard: Tensor, bucket: Tensor, label: int, note: Note) -> Pending:
        """Start to fill ``shard`` with this rank's slice of the sum of ``bucket``."""
        return super().reduce_scatter(shard, bucket, label, note) if bucket.numel() else DONE

    def all_reduce(self, tensor: Tensor, label: int, note: Note) -> Pending:
        """Start to sum ``tensor`` over the group in place."""
        return super().all_reduce(tensor, label, note) if tensor.numel() else DONE
