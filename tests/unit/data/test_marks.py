"""Test streams that resume at a mark: the same samples as without a resume, and few of them read again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.needs import needs_package
from zlaunch.runtime.data import EngineLoader, LoaderOptions
from zlaunch.runtime.data.marks import DISTANCE
from zlaunch.runtime.data.same_order import Digest

LENGTH = 5000
RESUMED = 3000


class Numbers(IterableDataset[list[float]]):
    """Yields its numbers, each beside draws from the three global generators."""

    reads = 0
    """Counts the samples that all streams of the class have yielded in this process."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.next = 0
        self.begins_at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["next"]

    def __iter__(self) -> Iterator[list[float]]:
        for number in range(self.begins_at, self.length):
            type(self).reads += 1
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


class Resumed(NamedTuple):
    whole: list[Any]
    """Has each rank's rest of an undisturbed epoch."""
    rest: list[Any]
    """Has what each rank has read after the resume."""
    reads: list[int]
    """Counts the samples that each rank's stream has yielded for it."""


def resumed(make_data: Any, ranks: int, workers: int) -> Resumed:
    """Resume in the middle of an epoch, on each of the ranks."""
    batches = RESUMED // (4 * ranks)
    whole = [read(make(make_data(), rank, ranks, num_workers=workers)) for rank in range(ranks)]
    rest = []
    reads = []
    for rank in range(ranks):
        before = make(make_data(), rank, ranks, num_workers=workers)
        read(before, batches)
        after = make(make_data(), rank, ranks, num_workers=workers)
        after.load_state_dict(before.state_dict())
        Numbers.reads = Lossy.reads = 0
        rest.append(read(after))
        reads.append(Numbers.reads + Lossy.reads)
    return Resumed([each[4 * batches :] for each in whole], rest, reads)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_a_resumed_stream_yields_what_it_would_have_without_being_read_again(
    ranks: int, workers: int
) -> None:
    found = resumed(Numbers, ranks, workers)
    assert found.rest == found.whole
    assert sum(len(each) for each in found.rest) >= LENGTH - RESUMED
    if not workers:  # worker processes have streams of their own
        for each in found.reads:
            assert LENGTH - RESUMED < each <= ranks + LENGTH - RESUMED + 2 * DISTANCE < LENGTH - 900


def test_it_resumes_on_other_numbers_of_ranks() -> None:
    before = make(Numbers(), 0, 2)
    read(before, RESUMED // 8)
    state = before.state_dict()
    assert state["mark"]["position"] == DISTANCE, "the last mark whose samples have all been read"
    after = make(Numbers(), 0, 1, batch=5)
    after.load_state_dict(state)
    Numbers.reads = 0
    rest = read(after)
    assert Numbers.reads < LENGTH - 900
    assert rest == read(make(Numbers(), 0, 1, batch=5))[RESUMED:]


def test_the_next_epoch_begins_at_the_beginning_and_the_state_is_saved_again() -> None:
    before = make(Numbers())
    read(before, RESUMED // 4)
    after = make(Numbers())
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
    found = resumed(Lossy, 1, 0)
    assert found.rest == found.whole and found.reads[0] > LENGTH
    assert "Lossy does not continue from its saved state (it yields other" in "".join(capsys.readouterr())


class Live(Numbers):
    """Returns the same dict each time, with what it has by then."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.state: dict[str, Any] = {"next": 0}

    def state_dict(self) -> dict[str, Any]:
        self.state["next"] = self.next
        return self.state


class Epochs(Numbers):
    """Has another order in each epoch, and a state that says which."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["next"]
        self.epoch = state["epoch"]

    def __iter__(self) -> Iterator[list[float]]:
        for number, *draws in super().__iter__():
            yield [number * 7 % self.length + self.epoch, *draws]


class Turns(Numbers):
    """Yields from two sources in turn, and restores only one of them."""

    def __iter__(self) -> Iterator[list[float]]:
        for number, *draws in super().__iter__():
            is_lost = self.begins_at and number % 2
            yield [number + 1000 * is_lost, *draws]


@pytest.mark.parametrize("kind", [Live, Epochs, Turns])
def test_unusual_streams_lose_nothing(kind: type[Numbers]) -> None:
    loaders = [make(kind()) for _ in range(3)]
    epochs = [read(loaders[0]) for _ in range(3)]
    read(loaders[1])
    read(loaders[1], RESUMED // 4)
    loaders[2].load_state_dict(loaders[1].state_dict())
    assert read(loaders[2]) == epochs[1][RESUMED:]
    assert read(loaders[2]) == epochs[2], "the next epoch begins at its beginning"


def test_a_resume_leaves_the_stream_to_others_as_it_was() -> None:
    before = make(Numbers())
    read(before, RESUMED // 4)
    stream = Numbers()
    after = make(stream)
    after.load_state_dict(before.state_dict())
    read(after, 1)
    assert len(list(stream)) == LENGTH and len(read(make(stream))) == LENGTH


def test_a_look_after_a_resume_keeps_the_mark() -> None:
    before = make(Numbers())
    read(before, 3070 // 4)
    steps = [0]
    after = EngineLoader(
        Numbers(), batch_size=4, rank=0, world_size=1, collate_fn=list, clock=lambda: steps[0]
    )
    after.load_state_dict(before.state_dict())
    read(after, 1)
    Numbers.reads = 0
    assert len(read(after)) == LENGTH - 3068 and Numbers.reads < LENGTH


class Changed(Numbers):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("shard_idx")


def test_an_error_on_the_way_is_said_and_the_stream_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    before = make(Numbers())
    read(before, RESUMED // 4)
    after = make(Changed())
    after.load_state_dict(before.state_dict())
    assert read(after) == read(make(Numbers()))[RESUMED:]
    assert "continue from its saved state (KeyError: 'shard_idx')" in "".join(capsys.readouterr())


class Broken(Numbers):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("not now")


class Large(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "all": "x" * (1 << 20)}


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Odd, "JSON would change it"), (Broken, "ValueError: not now"), (Large, "larger than 1048576")],
)
def test_a_state_that_is_not_saved_is_said_once(
    kind: type[Numbers], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = make(kind())
    read(before, RESUMED // 4)
    assert before.state_dict()["mark"] is None
    assert "".join(capsys.readouterr()).count(why) == 1
    found = resumed(kind, 1, 0)
    assert found.rest == found.whole


class OfAnotherKind(Numbers):
    def state_dict(self, num_samples: int) -> dict[str, Any]:  # type: ignore[override]
        raise AssertionError


def test_a_state_that_needs_arguments_is_not_asked_for() -> None:
    loader = make(OfAnotherKind())
    assert len(read(loader)) == LENGTH


def test_worker_processes_that_live_on_read_the_stream_again() -> None:
    loader = make(Numbers(), num_workers=1, persistent_workers=True)
    first = read(loader, RESUMED // 4)
    state = loader.state_dict()
    assert state["mark"] is not None
    loader.load_state_dict(state)
    assert first + read(loader) == read(make(Numbers()))


def test_a_digest_is_of_the_contents_in_their_order() -> None:
    def digest(*samples: Any) -> int:
        found = Digest()
        for sample in samples:
            found.add(sample)
        return found.value()

    text = "word"
    again = "".join(list(text))
    assert digest([text, text], {"a": text}) == digest([again, text], {"a": again}), "whoever holds a value"
    different = [
        ([1, 2],),
        ([1], [2]),
        ([2], [1]),
        ({"a": [1]},),
        ({"b": [1]},),
        (torch.ones(2),),
        (torch.ones(3),),
        ((torch.ones(2), 1),),
        (numpy.arange(3),),
        (numpy.arange(6).reshape(2, 3)[:, ::2],),
    ]
    assert len({digest(*samples) for samples in different}) == len(different)


@needs_package("datasets")
def test_threads_that_read_ahead_do_not_move_a_resumed_stream() -> None:
    """interleave_datasets reads ahead in threads, which an iterator left open would let run on."""
    import datasets

    def numbers(first: int) -> Any:
        rows = range(first, first + LENGTH // 2)
        return datasets.Dataset.from_dict({"number": rows}).to_iterable_dataset(num_shards=2)

    def stream() -> Any:
        both = datasets.interleave_datasets([numbers(0), numbers(10_000)])
        return both.map(lambda rows: rows, batched=True, batch_size=50)

    for _ in range(5):
        found = resumed(stream, 1, 0)
        assert found.rest == found.whole


@needs_package("datasets")
@pytest.mark.parametrize("buffer", [0, 100])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face(buffer: int, workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets

    def stream() -> Any:
        made = datasets.Dataset.from_dict({"number": range(LENGTH)}).to_iterable_dataset(num_shards=7)
        return made.shuffle(seed=3, buffer_size=buffer) if buffer else made

    found = resumed(stream, 1, workers)
    assert found.rest == found.whole
    assert ("shuffle buffer" in "".join(capfd.readouterr())) is bool(buffer)
