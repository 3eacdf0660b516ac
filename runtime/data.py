"""The data loader that ``initialize(training_data=...)`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class EngineLoader:
    """A DataLoader over this rank's share of a dataset, in a new order every epoch."""

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
        self.sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self.sampler = DistributedSampler(
                dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
            )
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, sampler=self.sampler, collate_fn=collate_fn, drop_last=drop_last
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)
