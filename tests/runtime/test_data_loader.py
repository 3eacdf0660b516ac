"""Test that every sample comes once per epoch: over ranks, worker processes, resumes and kinds of data."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import zlaunch
from tests.runtime.models import config
from tests.runtime.workers import run_workers
from zlaunch.runtime.data import EngineLoader, LoaderOptions
from zlaunch.runtime.data.order import Permutation, Shuffled
from zlaunch.runtime.data.same_order import digest
from zlaunch.runtime.errors import ParameterError

NUMEL = 48


class Stream(IterableDataset[int]):
    """Has ``length`` samples, in an order that the epoch decides, and shares them out among workers."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        info = get_worker_info()
        every = range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        return (each ^ (self.epoch & 1) if self.length % 2 == 0 else each for each in every)


class Blocks(Sampler[list[int]]):
    """Is a batch sampler: blocks of two samples, in an order that the epoch decides."""

    def __init__(self, length: int) -> None:
        self.starts = range(0, length, 2)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        for place in torch.randperm(len(self.starts), generator=generator).tolist():
            yield [self.starts[place], self.starts[place] + 1]


def make(kind: str, numel: int, rank: int, ranks: int, batch: int, **options: Any) -> EngineLoader:
    """Make a rank's loader of ``numel`` samples, the numbers from 0 on."""
    data: Any = Stream(numel) if kind == "stream" else range(numel)
    if kind == "sampler":
        options["sampler"] = WeightedRandomSampler(torch.ones(numel), numel, replacement=False)  # type: ignore[arg-type]
    if kind == "batches":
        options["batch_sampler"] = Blocks(numel)
    size = None if kind == "batches" else batch
    return EngineLoader(data, batch_size=size, rank=rank, world_size=ranks, **options)


def read(loader: EngineLoader, batches: int | None = None) -> list[list[int]]:
    found = []
    for number, batch in enumerate(loader, 1):
        found.append(batch.tolist())
        if number == batches:
            break
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [each for batch in batches for each in batch]


KINDS = ("indices", "sampler", "batches", "stream")


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    pairs=st.integers(1, 40),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3),
    last=st.tuples(st.integers(1, 4), st.integers(1, 5)),
)
def test_every_sample_comes_once_whatever_resumes(
    kind: str, pairs: int, runs: list[tuple[int, int, int]], last: tuple[int, int]
) -> None:
    """Runs of other numbers of ranks, of other batches, each resume in the first epoch of the one before."""
    numel = 2 * pairs
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    for ranks, batch, batches in (*runs, (*last, 0)):
        loaders = [make(kind, numel, rank, ranks, batch) for rank in range(ranks)]
        states = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            seen.update(flat(read(loader, batches or None)))
            states.append(loader.state_dict())
        assert all(each == states[0] for each in states), "every rank is as far as the others"
        state = states[0]
        if not batches or state.get("samples", state.get("batches")) == 0:
            break
    assert set(seen) == set(range(numel)), "none is left out"
    unit = 2 if kind == "batches" else 1
    most = max(ranks for ranks, *_ in (*runs, last))
    assert sum(seen.values()) - numel < unit * most, "less than a unit of each rank fills up the last batch"


@pytest.mark.parametrize("kind", KINDS)
def test_worker_processes_change_nothing(kind: str) -> None:
    for rank in range(2):
        alone = make(kind, 22, rank, 2, 3)
        workers = make(kind, 22, rank, 2, 3, options=LoaderOptions(num_workers=2, persistent_workers=True))
        epochs = [read(alone), read(alone)]
        assert [read(workers), read(workers)] == epochs, "the second one too, in the same processes"
        workers.load_state_dict({"epoch": 1, "samples": 6, "batches": 4})
        alone.load_state_dict({"epoch": 1, "samples": 6, "batches": 4})
        rest = read(workers)
        assert rest == read(alone) == epochs[0][-len(rest) :]


def test_the_next_epoch_begins_at_its_beginning() -> None:
    for kind in KINDS:
        loader = make(kind, NUMEL, 0, 1, 8)
        reference = make(kind, NUMEL, 0, 1, 8)
        epochs = [read(reference), read(reference)]
        assert sorted(flat(epochs[0])) == list(range(NUMEL)) and epochs[0] != epochs[1]
        assert read(loader) == epochs[0]
        state = loader.state_dict()
        assert state["epoch"] == 1 and state.get("samples", state.get("batches")) == 0
        again = make(kind, NUMEL, 0, 1, 8)
        again.load_state_dict(state)
        assert read(again) == epochs[1]
        assert again.epoch == 2


def test_a_loop_may_set_the_epoch() -> None:
    reference = make("indices", NUMEL, 0, 1, 8)
    epochs = [read(reference), read(reference), read(reference)]
    loader = make("indices", NUMEL, 0, 1, 8)
    loader.set_epoch(2)
    assert read(loader) == epochs[2]
    loader.load_state_dict({"epoch": 2, "samples": 16})
    loader.set_epoch(1)
    assert read(loader) == epochs[1][2:], "the epoch that was resumed"
    loader.load_state_dict({"epoch": 2, "samples": 16})
    loader.set_epoch(2)
    assert read(loader) == epochs[2]


class Random(torch.utils.data.Dataset[float]):
    """Draws what it returns, as transforms do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def test_transforms_in_workers_draw_other_numbers_on_each_rank_and_in_each_epoch() -> None:
    drawn = set()
    for rank in range(2):
        for _ in range(2):  # a second run draws the same
            options = LoaderOptions(num_workers=1)
            loader = EngineLoader(Random(), batch_size=2, rank=rank, world_size=2, options=options)
            before = torch.get_rng_state()
            drawn |= {tuple(flat(read(loader))), tuple(flat(read(loader)))}
            assert torch.equal(torch.get_rng_state(), before), "nothing from the generator of the model"
    assert len(drawn) == 4


def test_the_order_is_that_of_torchs_distributed_sampler() -> None:
    data: Any = range(NUMEL + 3)
    for rank in range(4):
        for shuffle, drop_last in ((True, False), (False, False), (True, True)):
            options: Any = {"shuffle": shuffle, "drop_last": drop_last}
            torchs: Any = DistributedSampler(data, 4, rank, seed=5, **options)
            own = EngineLoader(data, batch_size=1, rank=rank, world_size=4, seed=5, **options)
            for epoch in range(2):
                torchs.set_epoch(epoch)
                assert flat(read(own)) == list(torchs)
                assert len(own) == len(torchs)


def test_the_last_batch_is_left_out_alike_on_all_ranks() -> None:
    for kind in KINDS:
        found = [read(make(kind, 46, rank, 3, 4, drop_last=True)) for rank in range(3)]
        assert {len(each) for each in found} == {7 if kind == "batches" else 3}
        together = Counter(flat([*found[0], *found[1], *found[2]]))
        assert max(together.values()) == 1 and len(together) == (42 if kind == "batches" else 36)


@pytest.mark.parametrize("length", [1, 2, 3, 48, 1000, 70001])
def test_a_computed_order_has_each_index_once(length: int) -> None:
    places = torch.arange(length)
    first = Permutation(length, 1)(places)
    assert sorted(first.tolist()) == places.tolist()
    if length > 40:
        second = Permutation(length, 2)(places)
        assert not torch.equal(first, second) and not torch.equal(first, places)
        # of a random order, one index in `length` stays where it is, and one pair in `length` stays together
        assert (first == places).sum() < 12 and (first.diff() == 1).sum() < 12


def test_a_billion_samples_resume_without_drawing_the_order() -> None:
    """An order of 10**9 numbers in memory would be 8 GB on each rank."""
    order = Shuffled(10**9, shuffle=True, seed=3)
    assert not order.drawn
    found = order.share(1, 999_999_990, 1, 4, drop_last=False)
    rest = list(found.units)
    ranks = [list(order.share(1, 999_999_990, rank, 4, drop_last=False).units) for rank in range(4)]
    assert ranks[1] == rest and {len(each) for each in ranks} == {3}
    assert len({index for each in ranks for index in each}) == 12, "two of them from the epoch's beginning"


def test_a_position_of_an_earlier_version_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlaunch.runtime.data.order._DRAWN_NUMEL", 8)
    before = make("indices", NUMEL, 0, 1, 8)
    before.load_state_dict({"epoch": 1, "samples": 16})
    drawn = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(0)).tolist()
    assert flat(read(before)) == drawn[16:]
    assert flat(read(make("indices", NUMEL, 0, 1, 8))) != drawn


def test_a_digest_is_of_the_contents() -> None:
    values: list[Any] = [1, 1.0, "1", b"1", [1], {"a": 1}, torch.ones(1), torch.ones(1, 1), {"b", "a"}, None]
    assert len({digest(each) for each in values}) == len(values)
    assert digest({"x": torch.arange(3)}) == digest({"x": torch.arange(3)})
    assert digest({"x": torch.arange(3)}) != digest({"x": torch.arange(1, 4)})


# -- in training ------------------------------------------------------------------------------------


class Own(IterableDataset[Any]):
    """Shares itself out, as a script for DistributedDataParallel does."""

    def __iter__(self) -> Any:
        return iter(range(int(os.environ["RANK"]), 24, int(os.environ["WORLD_SIZE"])))


class OwnOrder(Sampler[int]):
    """Draws an order that is each rank's own."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(int(os.environ["RANK"]))))

    def __len__(self) -> int:
        return 24


def _refusals() -> list[str]:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(1, 1), config=config(1, 2))
    rank, ranks = engine.data_parallel_rank, engine.data_parallel_size
    data: Any = range(24)
    found = []

    def in_turn(loader: EngineLoader) -> None:
        """Read on rank 0 first: a training's steps keep the ranks together, nothing does here."""
        if rank == 0:
            list(loader)
        torch.distributed.barrier()
        if rank == 1:
            list(loader)

    next(iter(engine.dataloader(Own()))) if rank == 0 else None  # a look on one rank alone waits for nobody
    engine.dataloader(data) if rank else None
    for refused in (
        lambda: in_turn(engine.dataloader(DataLoader(Own(), 2, num_workers=1))),
        lambda: in_turn(engine.dataloader(DataLoader(data, 2, sampler=OwnOrder()))),
        lambda: engine.dataloader(DataLoader(data, 2, sampler=DistributedSampler(data, 4, 1))),
        lambda: engine.dataloader(DataLoader(data, 2), batch_size=3),
        lambda: engine.dataloader(engine.dataloader(data).loader.__class__(data, batch_sampler=_Mine(data))),
    ):
        try:
            torch.distributed.barrier()
            refused()
            found.append("")
        except ParameterError as error:
            found.append(str(error))
    same: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=7)
    same.set_epoch(0)
    loader = engine.dataloader(DataLoader(data, 2, sampler=same))
    assert flat(read(loader)) == list(same)
    return found


class _Mine(DistributedSampler[Any]):
    """Is a batch sampler of one rank."""


def test_what_shares_out_samples_itself_is_refused() -> None:
    first, second = run_workers(_refusals, 2)
    assert not first[0] and "data loader 2: rank 1 reads another first sample than rank 0" in second[0]
    assert not first[1] and "another first sample" in second[1]
    assert "is for rank 1 of 4, this is data-parallel rank 0 of 2" in first[2]
    assert "a DataLoader has its own batch_size" in first[3]
    assert "_Mine yields the samples of one rank" in second[4]


def _loader_of(engine: Any, kind: str) -> Any:
    data = TensorDataset(torch.arange(NUMEL))
    if kind == "stream":
        return engine.dataloader(DataLoader(Stream(NUMEL), 2, num_workers=1))
    if kind == "weighted":
        weights: Any = torch.ones(NUMEL)
        sampler = WeightedRandomSampler(weights, NUMEL, replacement=False)
        return engine.dataloader(DataLoader(data, 2, sampler=sampler))
    return engine.dataloader(DataLoader(data, 2, shuffle=True, num_workers=1))


def _train(folder: str, kind: str, batches: int) -> tuple[list[int], list[float]]:
    """Train from the checkpoint in a folder for some batches, by default to the end of the epoch; save."""
    zlaunch.init_distributed()
    torch.manual_seed(0)
    engine, *_ = zlaunch.initialize(
        model=torch.nn.Linear(1, 1), config={**config(1, 2), "dataloader_drop_last": True}
    )
    early = _loader_of(engine, kind) if kind != "weighted" else None
    engine.load_checkpoint(folder, missing_ok=True)
    # made after the load, it resumes all the same
    loader = _loader_of(engine, kind) if early is None else early
    seen: list[int] = []
    losses: list[float] = []
    for number, batch in enumerate(loader, 1):
        values = batch if isinstance(batch, torch.Tensor) else batch[0]
        seen += values.tolist()
        loss = (engine(values.float()[:, None] / NUMEL) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if number == batches:
            break
    engine.save_checkpoint(folder)
    return seen, losses


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "stream"])
def test_the_scripts_own_loader_resumes_inside_an_epoch(tmp_path: Path, kind: str) -> None:
    whole = run_workers(_train, 2, str(tmp_path / "whole"), kind, 0)
    begun = run_workers(_train, 2, str(tmp_path / "cut"), kind, 5)
    ended = run_workers(_train, 2, str(tmp_path / "cut"), kind, 0)
    assert [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(begun, ended, strict=True)] == [
        tuple(each) for each in whole
    ], "to the bit"


@pytest.mark.parametrize("kind", ["shuffled", pytest.param("stream", marks=pytest.mark.exhaustive)])
def test_an_epoch_goes_on_with_other_numbers_of_ranks(tmp_path: Path, kind: str) -> None:
    seen: Counter[int] = Counter()
    for ranks, batches in ((3, 3), (2, 2), (4, 0)):  # 18 samples, 8, and the 22 that are left
        found = run_workers(_train, ranks, str(tmp_path), kind, batches)
        seen.update(flat([samples for samples, _ in found]))
    assert set(seen) == set(range(NUMEL)) and sum(seen.values()) <= NUMEL + 3


def _short_epochs(micro: int, accumulation: int) -> str:
    zlaunch.init_distributed()
    data = TensorDataset(torch.arange(24))
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
