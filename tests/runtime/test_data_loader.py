"""Test where a data loader resumes: behind every sample that some rank has taken."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import zlaunch
from tests.runtime.models import config
from tests.runtime.workers import run_workers
from zlaunch.runtime.data import EngineLoader
from zlaunch.runtime.errors import ParameterError

NUMEL = 48


def loaders(world: int, batch: int, **options: Any) -> list[EngineLoader]:
    """Make the loaders of all ranks."""
    data: Any = torch.utils.data.TensorDataset(torch.arange(NUMEL))
    return [
        EngineLoader(data, batch_size=batch, rank=rank, world_size=world, **options) for rank in range(world)
    ]


def taken(loader: EngineLoader, batches: int | None = None) -> list[int]:
    found: list[int] = []
    for number, (batch,) in enumerate(loader, 1):
        found += batch.tolist()
        if number == batches:
            break
    return found


@pytest.mark.parametrize(
    ("world", "batch", "skipped"), [(2, 2, 12), (4, 1, 12), (1, 8, 16), (1, 5, 15), (3, 3, 18)]
)
def test_a_batch_that_was_taken_in_part_is_not_taken_again(world: int, batch: int, skipped: int) -> None:
    """12 samples have been taken: none comes twice, and a batch that has some of them is left out."""
    before = loaders(2, 2)
    seen = [index for loader in before for index in taken(loader, 3)]
    (state, same) = (loader.state_dict() for loader in before)
    assert state == same == {"epoch": 1, "samples": 12}
    after = loaders(world, batch)
    for loader in after:
        loader.load_state_dict(state)
    rest = [index for loader in after for index in taken(loader)]
    assert not {*seen} & {*rest}
    assert len({*rest}) == NUMEL - skipped
    assert {loader.epoch for loader in after} == {1}


def test_the_next_epoch_begins_at_its_beginning() -> None:
    (loader,) = loaders(1, 8)
    (reference,) = loaders(1, 8)
    epochs = [taken(reference), taken(reference)]
    assert sorted(epochs[0]) == list(range(NUMEL)) and epochs[0] != epochs[1]
    assert taken(loader) == epochs[0]
    state = loader.state_dict()
    assert state == {"epoch": 1, "samples": 0}
    (again,) = loaders(1, 8)
    again.load_state_dict(state)
    assert taken(again) == epochs[1]


def test_a_resumed_loader_counts_from_where_it_is() -> None:
    (loader,) = loaders(1, 8)
    whole = taken(loaders(1, 8)[0])
    loader.load_state_dict({"epoch": 1, "samples": 16})
    assert taken(loader, 2) == whole[16:32]
    assert loader.state_dict() == {"epoch": 1, "samples": 32}
    (again,) = loaders(1, 8)
    again.load_state_dict(loader.state_dict())
    assert taken(again) == whole[32:]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_a_stream_that_every_rank_would_read_whole_is_refused() -> None:
    with pytest.raises(ParameterError, match="Stream is an IterableDataset, so each of the 2 ranks"):
        EngineLoader(Stream(), batch_size=2, rank=0, world_size=2)


def test_a_stream_is_read_on_behind_what_was_taken() -> None:
    loader = EngineLoader(Stream(), batch_size=2, rank=0, world_size=1)
    loader.load_state_dict({"epoch": 1, "samples": 4})
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9]]


def _short_epochs(micro: int, accumulation: int) -> str:
    zlaunch.init_distributed()
    data = torch.utils.data.TensorDataset(torch.arange(24))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        zlaunch.initialize(
            model=torch.nn.Linear(2, 2), config=config(1, micro, accumulation), training_data=data
        )
    return said.getvalue()


def test_an_epoch_without_a_step_is_said() -> None:
    first, second = run_workers(_short_epochs, 2, 2, 8)
    assert "training_data: a rank gets 6 micro-batches per epoch, but a step needs 8" in first
    assert "training_data" not in second
    assert "training_data" not in run_workers(_short_epochs, 2, 2, 6)[0]
