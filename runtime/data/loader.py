"""The loader of an engine: this rank's batches, epoch after epoch, from a position that checkpoints store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data._utils.collate import default_collate, default_convert

from ..errors import ParameterError
from ..log import warn
from .draws import LARGEST_SEED
from .marks import Mark
from .order import Given, SampleOrder, Shuffled
from .same_order import SameOrder, digest
from .stream import CollatedWithNote, StreamShare


@dataclass(frozen=True)
class LoaderOptions:
    """Says how batches are read; see torch's DataLoader for each name."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    """Holds what only a DataLoader of the script sets, such as ``worker_init_fn``."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for torch's DataLoader."""
        found = {"num_workers": self.num_workers, "pin_memory": self.pin_memory, **self.more}
        if self.num_workers:  # torch refuses them without
            found["prefetch_factor"] = self.prefetch_factor
            found["persistent_workers"] = self.persistent_workers
        return found


class EngineLoader:
    """Loads this rank's share of a dataset in batches, in a new order each epoch, and resumes from a saved
    position.

    Every rank has as many batches in an epoch. Samples that do not divide evenly among the ranks: with
    ``drop_last`` they are left out, and so is a batch that is not full; otherwise samples from the beginning
    of the epoch come again, and the last batch is smaller.

    Attributes:

    - ``dataset``: what was given.
    - ``name``: what messages call it.
    - ``epoch``: the number of epochs that have begun.
    - ``taken``: this rank's batches since the epoch began or was resumed, 0 between two epochs.
    - ``batches_left``: the batches until the end of the epoch, None where that is not known.
    - ``batch_size``: the samples of a batch on this rank, None where a batch sampler decides.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None,
        rank: int,
        world_size: int,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        sampler: Any = None,
        batch_sampler: Any = None,
        options: LoaderOptions | None = None,
        name: str = "training_data",
        key: str | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """``sampler`` and ``batch_sampler`` yield indices, or lists of indices, for all ranks. A
        ``batch_size`` of None without either gives single samples. ``name`` is what messages call it; with
        ``key``, which is the loader's own on all ranks, ranks find out whether they read the same order.
        ``clock`` counts what is trained, so that a look at a batch is no epoch: a pass that was left at its
        first batch, before anything was trained, begins again.
        """
        self.epoch = 0
        self.taken = 0
        self.batch_size = batch_size
        self.name = name
        self.dataset = dataset
        self._seed = seed
        self._rank = rank
        self._ranks = world_size
        self._resumed = 0
        """Counts the units of all ranks behind which the present epoch was resumed."""
        self._overlaps = False
        """Records that a pass continues in which another one was begun."""
        self._ended_at: tuple[int, int] | None = None
        """Has the first unit and this rank's batches of the last pass, if it has ended."""
        self._has_resumed = False
        self._clock = clock
        self._begun_at: int | None = None
        """Is the clock at the beginning of a pass that has not ended."""
        self._passes = 0
        self._same_order = SameOrder(key, rank)
        self._first: int | None = None
        """Identifies the order of the present epoch, once it is known."""
        self._saved_first: int | None = None
        self._unit = "samples" if batch_sampler is None else "batches"
        self._step_units = world_size * (1 if batch_sampler is not None else batch_size or 1)
        self._order: SampleOrder | None = None
        self._units: _Units | None = None
        self._stream: StreamShare | None = None
        self._mark: Mark | None = None
        """Is a place before this position where the stream can be continued."""
        self._resumed_mark: Mark | None = None
        """Is the one of the position behind which the present epoch was resumed."""
        arguments = (options or LoaderOptions()).arguments()
        # Seeds the worker processes. torch's default would draw from the generator that the model uses.
        self._generator = torch.Generator()
        arguments["generator"] = self._generator
        if isinstance(dataset, IterableDataset):
            self._stream = StreamShare(
                dataset,
                batch_size=batch_size or 1,
                rank=rank,
                ranks=world_size,
                drop_last=drop_last,
                seed=seed,
            )
            plain = default_convert if batch_size is None else default_collate
            arguments["collate_fn"] = CollatedWithNote(self._stream, collate_fn or plain)
            if batch_size is not None:
                arguments["drop_last"] = drop_last
            self.loader: DataLoader[Any] = DataLoader(self._stream, batch_size=batch_size, **arguments)
            return
        arguments["collate_fn"] = collate_fn
        given = batch_sampler if batch_sampler is not None else sampler
        if given is not None:
            self._order = Given(given, seed=seed)
        else:
            length = len(dataset)  # type: ignore[arg-type]
            contents = _chosen_indices(dataset)
            self._order = Shuffled(length, shuffle=shuffle, seed=seed, contents=contents)
        size = None if batch_sampler is not None else batch_size
        self._units = _Units(self._order, rank=rank, ranks=world_size, size=size, drop_last=drop_last)
        if batch_sampler is None and batch_size is None:
            self.loader = DataLoader(dataset, sampler=self._units, batch_size=None, **arguments)
        else:
            self.loader = DataLoader(dataset, batch_sampler=self._units, **arguments)

    def __len__(self) -> int:
        return self._batches(0)

    def _batches(self, start: int) -> int:
        if self._units is None:
            raise TypeError(
                f"{self.name} is a stream, {type(self.dataset).__name__}, whose length is not known"
            )
        return self._units.batches(start)

    @property
    def batches_left(self) -> int | None:
        """Return the number of batches until the end of the epoch, None where that is not known."""
        try:
            return self._batches(self._resumed) - self.taken
        except TypeError:
            return None

    def place_of_rows(self, rows: int) -> tuple[int, int]:
        """Return where in the epoch the samples of all ranks' rows begin, and how many they are. Samples that
        are repeated, because they do not divide evenly among the ranks, do not count.

        ``rows``: number of rows on this rank. During a pass these are the rows of the last batch; after it,
        the rows of all batches.

        Raises ParameterError for another number of rows, in a pass that another one was begun in, for a
        stream, whose length is not known, and for batches of a batch sampler.
        """
        length = self._length()
        if length is None or self._unit == "batches":
            what = "a batch sampler" if self._unit == "batches" else "a stream"
            raise ParameterError(
                f"{self.name} reads {what}, so it does not know which samples of a batch are repeated"
            )
        if self._overlaps:
            raise ParameterError(
                f"{self.name}: another pass was begun inside of this one, so it does not know which batch "
                "the rows are of: look at samples with another loader"
            )
        if self._ended_at is None:
            begin = self._resumed + (self.taken - 1) * self._step_units
            end = min(length, begin + self._step_units) if self.taken else begin
            what = "its last batch" if self.taken else "no batch yet"
        else:
            # Not the last batch alone: a loop over list(loader) would pass each as if it were the last.
            begin, batches = self._ended_at
            end = min(length, begin + batches * self._step_units)
            what = "all batches of the pass that has ended"
        expected = -(-(end - begin) // self._ranks)
        if rows != expected:
            raise ParameterError(
                f"{self.name}: {rows} rows of this rank, but {expected} samples in {what}: pass one row for "
                "each sample, right after each batch, or once after the loop with the rows of all batches"
            )
        return begin, end - begin

    # -- an epoch

    @property
    def sampler(self) -> EngineLoader:
        """Return what has :meth:`set_epoch`, as loops for DistributedDataParallel call it."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0 on. Not needed: the loader counts. The rest of an epoch
        that a checkpoint was written in stays the rest where it has this number.
        """
        if not ((self._has_resumed or self._was_look()) and epoch == self.epoch - 1):
            self._has_resumed = False
            self._begun_at = None
            self.epoch = epoch

    def _was_look(self) -> bool:
        """Tell whether the script has left the last pass at its first batch, without training on it."""
        return self._clock is not None and self.taken <= 1 and self._begun_at == self._clock()

    def __iter__(self) -> Iterator[Any]:
        if not (self._has_resumed or self._was_look()):
            self._resumed = 0
            self._saved_first = None
            self._resumed_mark = None
            self.epoch += 1
        self._has_resumed = False
        self._mark = self._resumed_mark
        self._begun_at = None if self._clock is None else self._clock()
        self._passes += 1
        self.taken = 0
        self._overlaps = False
        self._ended_at = None
        self._first = None
        self._same_order.next_epoch()
        # Transforms in worker processes draw other numbers on each rank and in each epoch.
        number = (self.epoch - 1) * self._ranks + self._rank
        self._generator.manual_seed((self._seed + number) % LARGEST_SEED)
        if self._units is not None:
            self._units.epoch = self.epoch - 1
            self._units.start = self._resumed
            batches = iter(self.loader)
            self._first = self._units.first
            return self._counted(batches)
        assert self._stream is not None
        self._stream.begin(self.epoch - 1, self._resumed, self._mark, self._saved_first)
        return self._counted(self._without_notes(iter(self.loader), self._passes))

    def _without_notes(self, noted: Iterator[tuple[Any, int | None, Mark | None]], own: int) -> Iterator[Any]:
        for batch, first, mark in noted:
            if None not in (first, self._first) and first != self._first:
                raise ParameterError(
                    f"{self.name}: worker processes read different orders, but each keeps its share of one: "
                    "seed the stream's shuffle"
                )
            self._first = self._first if first is None else first
            if mark is not None and own == self._passes:
                self._mark = mark
            yield batch

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        own = self._passes
        for batch in batches:
            if own == self._passes:
                self.taken += 1
                if self._first is not None:
                    self._check_order(self._first)
            elif self._clock is not None:  # checkpoints store the position of the later pass
                raise RuntimeError(
                    f"{self.name}: this pass has ended, as another was begun or a checkpoint was loaded: "
                    "iterate over the loader anew"
                )
            else:
                self._overlaps = True
            yield batch
        if own == self._passes:
            self._ended_at = self._resumed, self.taken
            self.taken = 0
            self._resumed = 0
            self._first = None
            self._begun_at = None

    def _check_order(self, first: int) -> None:
        """Raise ParameterError if rank 0 has another order; warn where the checkpoint's run had another."""
        if not self._same_order.check(self.epoch, first):
            raise ParameterError(
                f"{self.name}: rank {self._rank} reads other samples first than rank 0, but all ranks have "
                "to read the same order, which zlaunch shares out. Leave out the script's own sharing (by "
                "RANK, split_dataset_by_node or a DistributedSampler), and give a random generator of the "
                "script's own the same seed on all ranks; or iterate over a DataLoader of your own"
            )
        if self._saved_first is not None and self._saved_first != first and self._rank == 0:
            warn(
                f"{self.name}: its order is another than in the run that wrote the checkpoint, so samples "
                "of this epoch may come again and others be left out: an order has to follow from "
                "set_epoch, or from a generator with the same seed in each run"
            )
        self._saved_first = None

    # -- its position

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the number of started epochs, and the samples that all ranks have read in the
        current one (0 at its end); with a batch sampler, its batches.
        """
        units = self._resumed + self.taken * self._step_units
        found: dict[str, Any] = {"epoch": self.epoch, self._unit: units}
        found |= {"first": self._first, "length": self._length()}
        if self._stream is not None:
            found["ranks"] = self._ranks  # "first" identifies as many samples
            found["mark"] = self._mark.as_dict() if units and self._mark is not None else None
        return {**found, "drawn": self._order.drawn} if isinstance(self._order, Shuffled) else found

    def _length(self) -> int | None:
        """Return the number of units of an epoch, None where that is not known."""
        try:
            return None if self._order is None else len(self._order)
        except TypeError:
            return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position of the next iteration, for any number of ranks."""
        units = int(state.get(self._unit, 0))
        self.epoch = int(state["epoch"])
        length = state.get("length", self._length())
        if self._unit not in state or (units and length != self._length()):
            warn(
                f"{self.name}: an epoch had {length} {self._unit} in the run that wrote the checkpoint and "
                f"has {self._length()} now: the epoch begins anew"
                if self._unit in state
                else f"{self.name}: the checkpoint's position does not count {self._unit}, as this loader "
                "does: the epoch begins anew"
            )
            self.epoch -= 1
            units = 0
        self._resumed = units
        self._has_resumed = units > 0
        self._begun_at = None
        self._passes += 1
        self.taken = 0
        mark = state.get("mark") if units else None
        self._resumed_mark = None if mark is None else Mark.of(mark)
        self._mark = self._resumed_mark
        is_comparable = state.get("ranks", self._ranks) == self._ranks
        self._saved_first = state.get("first") if units and is_comparable else None
        if isinstance(self._order, Shuffled) and units:
            # Earlier versions drew an order of any length.
            self._order.drawn = bool(state.get("drawn", True))


def _chosen_indices(dataset: Any) -> int | None:
    """Return what identifies the indices of torch's Subset, also of one inside; None for other data sets."""
    chosen = []
    while isinstance(dataset, Subset):
        chosen.append(list(dataset.indices))
        dataset = dataset.dataset
    return digest(chosen) if chosen else None


class _Units:
    """Is torch's view of an epoch: this rank's units, by themselves or in batches of ``size``. torch asks for
    them at the beginning of a pass.

    It does not know the loader: the two and torch's would hold each other, and worker processes would live
    on until Python's collector runs, maybe in one of them.
    """

    def __init__(
        self, order: SampleOrder, *, rank: int, ranks: int, size: int | None, drop_last: bool
    ) -> None:
        self._order = order
        self._rank = rank
        self._ranks = ranks
        self._size = size
        self._drop_last = drop_last
        self.epoch = 0
        """Is the number of the epoch, from 0 on."""
        self.start = 0
        """Counts the units of all ranks that the next pass leaves out."""
        self.first: int | None = None
        """Identifies the order of the last pass."""

    def __iter__(self) -> Iterator[Any]:
        found = self._order.share(self.epoch, self.start, self._rank, self._ranks, self._drop_last)
        self.first = digest(found.first)
        return found.units if self._size is None else self._batched(found.units, self._size)

    def _batched(self, units: Iterator[Any], size: int) -> Iterator[list[Any]]:
        while batch := list(islice(units, size)):
            if len(batch) == size or not self._drop_last:
                yield batch

    def __len__(self) -> int:
        return self.batches(0)

    def batches(self, start: int) -> int:
        """Return the number of a rank's batches behind the first ``start`` units of all ranks.

        Raises TypeError if it is not known.
        """
        left = max(0, len(self._order) - start)
        size = self._size or 1
        if self._drop_last:
            return left // (self._ranks * size)
        share = -(-left // self._ranks)
        return -(-share // size)
