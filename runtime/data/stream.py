"""Data sets without indices: every rank, and every worker process of it, reads all and keeps its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..log import warn
from .draws import Draws
from .marks import DISTANCE, Mark, MarkedStream
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
        self._where = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._mark: Mark | None = None
        """Is where the next pass may begin to read."""
        self._mark_first: int | None = None
        """Identifies the first samples of the epoch of the mark."""
        self._marks_set = 0
        """Numbers the mark; a worker process that lives on has an older one."""
        self._marks: MarkedStream | None = None
        self._has_complained = False
        self.first: int | None = None
        """Identifies the first samples of the stream, once they were read in this process."""

    def begin(self, epoch: int, start: int, mark: Mark | None = None, first: int | None = None) -> None:
        """Set the epoch, and how many samples of all ranks the next pass leaves out. ``mark``: where the
        stream may be continued instead of read from its beginning; ``first`` is what :attr:`first` is then.
        """
        self._where[0] = epoch
        self._where[1] = start
        self._mark = mark
        self._mark_first = first
        self._marks_set += 1
        self._where[2] = self._marks_set
        _set_epoch(self._stream, epoch)

    def take_mark(self) -> Mark | None:
        """Return the last mark of the stream that this process has read, if it is a new one."""
        if self._marks is None:
            return None
        mark = self._marks.mark
        self._marks.mark = None
        return mark

    def __iter__(self) -> Iterator[Any]:
        where = self._where.tolist()
        epoch = where[0]
        start = where[1]
        marks_set = where[2]
        _set_epoch(self._stream, epoch)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        mark = self._mark if marks_set == self._marks_set else None
        return self._share(epoch, start, mark, worker, workers)

    def _share(self, epoch: int, start: int, mark: Mark | None, worker: int, workers: int) -> Iterator[Any]:
        warns = worker == 0 and self._rank == 0
        behind = None
        if mark is not None and mark.position + DISTANCE <= start:
            behind = self._behind(mark, epoch, warns=warns)
        begun: list[Any] = []  # what fills up the last batch of all ranks
        if behind is None or mark is None:
            draws, everything = self._from_beginning(epoch, warns=warns)
            with draws.active():
                begun = list(islice(everything, self._ranks))
            self.first = digest(begun) if begun else None
            everything = chain(begun, everything)
            skipped = 0
        else:
            draws, everything = behind
            self.first = self._mark_first
            skipped = mark.position + DISTANCE
        with draws.active():
            skipped += sum(1 for _ in islice(everything, start - skipped))
        if skipped < start and warns:
            warn(
                f"{type(self._stream).__name__} ends after {skipped} samples, before the position of the "
                f"checkpoint, {start}: nothing is left of this epoch"
            )
        for number, block in enumerate(draws.blocks(everything, self._step_samples)):
            if number % workers == worker:
                if not begun and len(block) % self._ranks and not self._drop_last:
                    begun = self._first_samples(epoch)
                yield from shared_out([block], begun, self._rank, self._ranks, self._drop_last)

    def _from_beginning(self, epoch: int, *, warns: bool) -> tuple[Draws, Iterator[Any]]:
        """Begin to read the stream at its beginning; return its draws as well."""
        draws = Draws(self._seed + epoch)
        self._marks = MarkedStream(self._stream, draws, self._seed + epoch, self._complaint(warns))
        return draws, self._marks.read(_told_of_no_workers(self._stream))

    def _first_samples(self, epoch: int) -> list[Any]:
        """Return the first samples of the epoch, one for each rank."""
        draws = Draws(self._seed + epoch)
        with draws.active():
            return list(islice(_told_of_no_workers(self._stream), self._ranks))

    def _behind(self, mark: Mark, epoch: int, *, warns: bool) -> tuple[Draws, Iterator[Any]] | None:
        """Return draws and the samples behind a mark; None where the stream cannot be continued there. See
        Notes [Marks are tested] and [A copy is moved] in `marks`.
        """
        draws = Draws(self._seed + epoch)
        try:
            copy = deepcopy(self._stream)
            _set_epoch(copy, epoch)
            marks = MarkedStream(copy, draws, self._seed + epoch, self._complaint(warns))
            samples = marks.continue_at(mark, lambda: _told_of_no_workers(copy))
            why = "it yields other samples than before; Hugging Face's state has no shuffle buffer"
        except Exception as error:  # the stream's own; the script may have changed it
            samples = None
            why = f"{type(error).__name__}: {error}"
        if samples is None:
            if warns:
                warn(
                    f"{type(self._stream).__name__} does not continue from its saved state ({why}), so it is "
                    "read from its beginning to the position of the checkpoint, which takes longer"
                )
            return None
        self._marks = marks
        return draws, samples

    def _complaint(self, warns: bool) -> Callable[[str], None]:
        """Return what says once that a resume will take long."""

        def complain(why: str) -> None:
            if warns and not self._has_complained:
                warn(f"{type(self._stream).__name__}: {why}, so a resume reads it from its beginning")
            self._has_complained = True

        return complain


def _set_epoch(stream: Any, epoch: int) -> None:
    # Hugging Face's streams add to a number in shared memory: worker processes that all set it at once would
    # add more than once. Here it is set before they begin, and they find it there.
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch) and getattr(stream, "epoch", None) != epoch:
        set_epoch(epoch)


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
    """Collates samples, and gives notes of the stream that this process has read with each batch: what
    identifies its order, and its last mark, if that is a new one.
    """

    def __init__(self, stream: StreamShare, collate_fn: Callable[[Any], Any]) -> None:
        self._stream = stream
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> tuple[Any, int | None, Mark | None]:
        return self._collate_fn(samples), self._stream.first, self._stream.take_mark()
