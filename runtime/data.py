"""Defines the data loader that ``initialize(training_data=...)`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from .errors import ParameterError


class ResumableSampler(DistributedSampler[Any]):
    """Yields a rank's items, once without the first :attr:`skip` of them."""

    skip = 0

    def __iter__(self) -> Iterator[Any]:
        skip = self.skip
        self.skip = 0
        return islice(super().__iter__(), skip, None)


class EngineLoader:
    """Load this rank's share of a dataset in batches, reshuffle it every epoch, and resume from a saved
    position.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.epoch = 0
        """Counts the epochs that have begun."""
        self._step_samples = batch_size * world_size
        self.taken = 0
        """Counts this rank's batches of the present epoch, 0 between two epochs."""
        self._skip = 0
        """Counts this rank's batches to be skipped in the next."""
        self.sampler: ResumableSampler | None = None
        if isinstance(dataset, IterableDataset) and world_size > 1:
            raise ParameterError(
                f"training_data: {type(dataset).__name__} is an IterableDataset, so each of the {world_size} "
                "ranks would read every sample. Pass a dataset with __getitem__, or use your own DataLoader "
                "that yields different samples on each rank"
            )
        if not isinstance(dataset, IterableDataset):
            self.sampler = ResumableSampler(
                dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
            )
        self.batch_size = batch_size
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            # a separate generator: otherwise every epoch would draw from the one that the model uses
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        skip = self._skip
        self._skip = 0
        epoch = self.epoch
        self.epoch = self.epoch + 1
        self.taken = skip
        if self.sampler is None:
            return self._counted(islice(self.loader, skip, None))
        self.sampler.set_epoch(epoch)
        self.sampler.skip = skip * self.batch_size
        return self._counted(iter(self.loader))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.taken += 1
            yield batch
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position: the number of started epochs, and the samples that all ranks have read in the
        current one (0 at its end).
        """
        return {"epoch": self.epoch, "samples": self.taken * self._step_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the position of the next iteration, for any number of ranks."""
        self._skip = -(-int(state["samples"]) // self._step_samples)
        self.epoch = int(state["epoch"]) - (1 if self._skip else 0)
