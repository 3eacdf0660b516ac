"""Test streams that resume at a mark: the same samples as without a resume, and few of them read again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.needs import needs_package
from zlaunch.runtime.data import EngineLoader, LoaderOptions
from zlaunch.runtime.data.marks import DISTANCE

LENGTH = 5000
RESUMED = 3000


class Numbers(IterableDataset[list[float]]):
    """Yields its numbers, each beside draws from the three global generators."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.next = 0
        self.begins_at = 0
        self.reads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["next"]

    def __iter__(self) -> Iterator[list[float]]:
        for number in range(self.begins_at, self.length):
            self.reads += 1
            self.next = number + 1
            yield [float(number), random.random(), numpy.random.random(), torch.rand(()).item()]


class Lossy(Numbers):
    """Leaves a sample out where it resumes, as a shuffle buffer does."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["next"] + 1 if state["next"] else 0


class Odd(Numbers):
    """Has a state that JSON changes."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": (self.next,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.begins_at,) = state["next"]


def make(data: Any, rank: int = 0, ranks: int = 1, batch: int = 4, **options: Any) -> EngineLoader:
    own = LoaderOptions(**options)
    return EngineLoader(data, batch_size=batch, rank=rank, world_size=ranks, options=own, collate_fn=list)


def read(loader: EngineLoader, batches: int | None = None) -> list[Any]:
    found: list[Any] = []
    for number, batch in enumerate(loader, 1):
        found += batch
        if number == batches:
            break
    return found


def resumed(make_data: Any, ranks: int, workers: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return an undisturbed epoch of all ranks and a resumed one's rest, in order, and the resumed data."""
    batches = RESUMED // (4 * ranks)
    whole = [read(make(make_data(), rank, ranks, num_workers=workers)) for rank in range(ranks)]
    rest = []
    data = []
    for rank in range(ranks):
        before = make(make_data(), rank, ranks, num_workers=workers)
        read(before, batches)
        after = make(make_data(), rank, ranks, num_workers=workers)
        after.load_state_dict(before.state_dict())
        rest.append(read(after))
        data.append(after.dataset)
    return [each[4 * batches :] for each in whole], rest, data


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_a_resumed_stream_yields_what_it_would_have_without_being_read_again(
    ranks: int, workers: int
) -> None:
    whole, rest, data = resumed(Numbers, ranks, workers)
    assert rest == whole
    assert sum(len(each) for each in rest) >= LENGTH - RESUMED
    if not workers:  # worker processes have streams of their own
        for each in data:
            assert each.reads <= ranks + LENGTH - RESUMED + 2 * DISTANCE < LENGTH - 900


def test_it_resumes_on_other_numbers_of_ranks() -> None:
    before = make(Numbers(), 0, 2)
    read(before, RESUMED // 8)
    state = before.state_dict()
    assert state["mark"]["position"] == DISTANCE, "the last mark whose witnesses have all been read"
    data = Numbers()
    after = make(data, 0, 1, batch=5)
    after.load_state_dict(state)
    assert read(after) == read(make(Numbers(), 0, 1, batch=5))[RESUMED:]
    assert data.reads < LENGTH - 900


def test_the_next_epoch_begins_at_the_beginning_and_the_state_is_saved_again() -> None:
    before = make(Numbers())
    read(before, RESUMED // 4)
    data = Numbers()
    after = make(data)
    after.load_state_dict(before.state_dict())
    read(after, 1)
    again = make(Numbers())
    again.load_state_dict(after.state_dict())
    first = read(make(Numbers()))
    assert read(again) == first[RESUMED + 4 :]
    read(after)
    second = read(after)
    assert [each[0] for each in second] == [each[0] for each in first] and second != first
    assert after.state_dict()["mark"] is None


def test_a_stream_that_resumes_with_other_samples_is_read_from_its_beginning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, rest, (data,) = resumed(Lossy, 1, 0)
    assert rest == whole and data.reads > LENGTH
    assert "Lossy yields other samples after load_state_dict than before" in "".join(capsys.readouterr())


def test_a_state_that_json_changes_is_not_used() -> None:
    before = make(Odd())
    read(before, RESUMED // 4)
    assert before.state_dict()["mark"] is None
    whole, rest, _ = resumed(Odd, 1, 0)
    assert rest == whole


def test_worker_processes_that_live_on_read_the_stream_again() -> None:
    loader = make(Numbers(), num_workers=1, persistent_workers=True)
    first = read(loader, RESUMED // 4)
    state = loader.state_dict()
    assert state["mark"] is not None
    loader.load_state_dict(state)
    assert first + read(loader) == read(make(Numbers()))


@needs_package("datasets")
@pytest.mark.parametrize("buffer", [0, 100])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face(buffer: int, workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets

    def stream() -> Any:
        made = datasets.Dataset.from_dict({"number": range(LENGTH)}).to_iterable_dataset(num_shards=7)
        return made.shuffle(seed=3, buffer_size=buffer) if buffer else made

    whole, rest, _ = resumed(stream, 1, workers)
    assert rest == whole
    assert ("shuffle buffer" in "".join(capfd.readouterr())) is bool(buffer)
