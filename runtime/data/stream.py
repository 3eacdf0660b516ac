"""Data sets without indices: every rank, and every worker process of it, reads all and keeps its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..log import warn
from .draws import Draws
from .order import shared_out
from .same_order import digest


class StreamShare(IterableDataset[Any]):
    """Yields this rank's samples of a stream, in the order and with the batches of one reader.

    ``get_worker_info`` returns None to the stream: a stream that splits itself between workers would be split
    twice. Its draws from global generators follow from ``seed`` and the epoch, in every process. Worker ``i``
    of ``n`` keeps the batches ``i``, ``i + n``, and so on, because torch's loader asks the workers in turn.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        *,
        batch_size: int,
        rank: int,
        ranks: int,
        drop_last: bool,
        seed: int,
    ) -> None:
        self._stream = stream
        self._step_samples = batch_size * ranks
        self._rank = rank
        self._ranks = ranks
        self._drop_last = drop_last
        self._seed = seed
        # In shared memory: worker processes that live on hear of the next epoch.
        self._where = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.first: int | None = None
        """Identifies the first samples of the stream, once they were read in this process."""

    def begin(self, epoch: int, start: int) -> None:
        """Set the epoch, and how many samples of all ranks the next pass leaves out."""
        self._where[0] = epoch
        self._where[1] = start
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        # Hugging Face's streams add to a number in shared memory: worker processes that all set it at once
        # would add more than once. Here it is set before they begin, and they find it there.
        set_epoch = getattr(self._stream, "set_epoch", None)
        if callable(set_epoch) and getattr(self._stream, "epoch", None) != epoch:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._where.tolist()
        self._set_epoch(epoch)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self._share(Draws(self._seed + epoch), start, worker, workers)

    def _share(self, draws: Draws, start: int, worker: int, workers: int) -> Iterator[Any]:
        samples = _told_of_no_workers(self._stream)
        with draws.active():
            begun = list(islice(samples, self._ranks))  # what fills up the last batch of all ranks
        self.first = digest(begun) if begun else None
        everything = chain(begun, samples)
        with draws.active():
            left_out = sum(1 for _ in islice(everything, start))
        if left_out < start and worker == 0 and self._rank == 0:
            warn(
                f"{type(self._stream).__name__} ends after {left_out} samples, before the position of the "
                f"checkpoint, {start}: nothing is left of this epoch"
            )
        for number, block in enumerate(draws.blocks(everything, self._step_samples)):
            if number % workers == worker:
                yield from shared_out([block], begun, self._rank, self._ranks, self._drop_last)


def _told_of_no_workers(stream: IterableDataset[Any]) -> Iterator[Any]:
    """Iterate over a stream that `get_worker_info` tells of no worker processes."""

    def alone(call: Callable[[], Any]) -> Any:
        info = torch_worker._worker_info
        torch_worker._worker_info = None
        try:
            return call()
        finally:
            torch_worker._worker_info = info

    samples = alone(lambda: iter(stream))
    end = object()
    while (sample := alone(lambda: next(samples, end))) is not end:
        yield sample


class CollatedWithNote:
    """Collates samples, and gives the note of the stream that this process has read with each batch."""

    def __init__(self, stream: StreamShare, collate_fn: Callable[[Any], Any]) -> None:
        self._stream = stream
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> tuple[Any, int | None]:
        return self._collate_fn(samples), self._stream.first
