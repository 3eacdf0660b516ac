"""Reads off a DataLoader of the script what it loads, so that a loader of the engine loads the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..errors import ParameterError
from .loader import LoaderOptions

_COPIED = ("timeout", "worker_init_fn", "multiprocessing_context")


@dataclass(frozen=True)
class DataSource:
    """Says what a loader reads, and in which batches; see :class:`EngineLoader` for each name."""

    dataset: Dataset[Any]
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any] | None
    options: LoaderOptions = field(default_factory=LoaderOptions)
    seed: int | None = None
    """Is the seed of the script's own sampler or generator, None for the config's."""
    sampler: Any = None
    batch_sampler: Any = None


def check_data(data: Any, batch_size: Any, shuffle: Any, num_workers: Any) -> None:
    """Raise ParameterError for arguments of ``engine.dataloader`` that are not what it takes."""
    has_items = hasattr(type(data), "__len__") and hasattr(type(data), "__getitem__")
    is_data = isinstance(data, (DataLoader, IterableDataset)) or has_items
    if not is_data or isinstance(data, (str, bytes, Mapping)):
        raise ParameterError(
            "engine.dataloader: expected a dataset with __len__ and __getitem__, an IterableDataset or "
            f"torch's DataLoader, got {type(data).__name__}"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if value is not None and not is_count:
            raise ParameterError(
                f"engine.dataloader: {name} is {value!r}: expected a whole number from {least} on"
            )
    if shuffle is not None and not isinstance(shuffle, bool):
        raise ParameterError(f"engine.dataloader: shuffle is {shuffle!r}: expected True or False")


def read_source(loader: DataLoader[Any], *, rank: int, ranks: int) -> DataSource:
    """Return what a DataLoader of the script reads, all of it, on the data-parallel ``rank`` of ``ranks``.

    A shuffle keeps the seed of its generator, and a DistributedSampler its own seed. torchdata's
    StatefulDataLoader counts as torch's DataLoader: checkpoints of the engine have its position. Raises
    ParameterError for a loader whose class or sampler splits the samples between the ranks, and for a state
    that the script has loaded into a StatefulDataLoader.
    """
    if _is_torchdatas(loader, "StatefulDataLoader"):
        if getattr(loader, "next_iter_state", None) is not None:
            raise ParameterError(
                "engine.dataloader: a state was loaded into the StatefulDataLoader, but the position comes "
                "from the checkpoint that the engine loads: leave out loader.load_state_dict()"
            )
    elif type(loader).__iter__ is not DataLoader.__iter__:
        raise ParameterError(
            f"engine.dataloader: {type(loader).__name__} overrides DataLoader.__iter__, so its order is "
            "unknown: pass the dataset, or a plain DataLoader"
        )
    if not getattr(loader, "in_order", True):
        raise ParameterError(
            "engine.dataloader: the DataLoader has in_order=False, but a position counts batches in their "
            "order: leave the argument out"
        )
    options = LoaderOptions(
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        more={name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)},
    )
    found = DataSource(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=False,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        options=options,
    )
    if isinstance(loader.dataset, IterableDataset):
        return found
    batches: Any = loader.batch_sampler
    is_plain = type(batches) is BatchSampler or _is_torchdatas(batches, "BatchSampler")
    if batches is not None and not is_plain:
        _refuse_shared(batches)
        _refuse_shared(getattr(batches, "sampler", None))
        return replace(found, batch_size=None, batch_sampler=batches)
    if batches is not None:
        # A BatchSampler that the script has made itself leaves its sizes to the loader's None.
        found = replace(found, batch_size=batches.batch_size, drop_last=batches.drop_last)
    sampler: Any = loader.sampler if batches is None else batches.sampler
    if type(sampler) is DistributedSampler or _is_torchdatas(sampler, "StatefulDistributedSampler"):
        return _of_distributed(found, sampler, rank, ranks)
    if type(sampler) is SequentialSampler:
        return found
    is_shuffle = type(sampler) is RandomSampler or _is_torchdatas(sampler, "RandomSampler")
    is_whole = is_shuffle and not sampler.replacement
    if is_whole and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        # torchdata's sampler makes a generator where the script gives none: each rank another one
        own = sampler.generator if type(sampler) is RandomSampler else loader.generator
        return replace(found, shuffle=True, seed=None if own is None else own.initial_seed())
    _refuse_shared(sampler)
    return replace(found, sampler=sampler)


def _is_torchdatas(value: Any, name: str) -> bool:
    """Tell whether this is a class of torchdata, which need not be installed, or iterates as it does."""
    for kind in type(value).__mro__:
        if kind.__name__ == name and kind.__module__.startswith("torchdata.stateful_dataloader"):
            return type(value).__iter__ is kind.__iter__  # type: ignore[attr-defined]
    return False


def _of_distributed(found: DataSource, sampler: DistributedSampler[Any], rank: int, ranks: int) -> DataSource:
    if (sampler.num_replicas, sampler.rank) != (ranks, rank):
        raise ParameterError(
            f"engine.dataloader: the loader's DistributedSampler is for rank {sampler.rank} of "
            f"{sampler.num_replicas}, this is data-parallel rank {rank} of {ranks}: leave the sampler "
            "out, or give it engine.data_parallel_size and engine.data_parallel_rank"
        )
    return replace(
        found, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last or found.drop_last
    )


def _refuse_shared(sampler: Any) -> None:
    """Raise ParameterError for a sampler that yields one rank's samples."""
    if sampler is not None and getattr(sampler, "num_replicas", 1) != 1:
        raise ParameterError(
            f"engine.dataloader: {type(sampler).__name__} yields the samples of one rank (it has "
            "num_replicas): pass a sampler that yields the samples of all ranks, or iterate over the "
            "DataLoader itself"
        )
