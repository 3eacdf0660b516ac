"""Test that every sample comes once per epoch: over ranks, worker processes, resumes and kinds of data."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import zlaunch
from tests.runtime.models import config
from tests.runtime.workers import run_workers
from zlaunch.runtime.data import EngineLoader, LoaderOptions, read_source
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


class Drawn(IterableDataset[int]):
    """Draws its order from a global generator, as most shuffles do."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Any:
        if self.kind == "torch":
            return iter(torch.randperm(24).tolist())
        if self.kind == "numpy":
            return iter(numpy.random.permutation(24).tolist())
        return iter(random.sample(range(24), 24))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_draw_from_a_global_generator_is_the_same_everywhere(kind: str) -> None:
    """In each process and rank, whatever seeds these have, and after a resume; the model's goes on."""
    orders = []
    for workers in (0, 2):
        for rank in range(2):
            torch.manual_seed(rank)
            random.seed(rank)
            numpy.random.seed(rank)
            options = LoaderOptions(num_workers=workers)
            loader = EngineLoader(Drawn(kind), batch_size=3, rank=rank, world_size=2, options=options)
            before = (torch.rand(()), random.random(), numpy.random.rand())
            orders.append([flat(read(loader)), flat(read(loader))])
            torch.manual_seed(rank)
            random.seed(rank)
            numpy.random.seed(rank)
            assert before == (torch.rand(()), random.random(), numpy.random.rand())
            loader.load_state_dict({"epoch": 2, "samples": 12})
            assert flat(read(loader)) == orders[-1][1][6:]
    assert orders[:2] == orders[2:] and orders[0][0] != orders[0][1]
    for epoch in range(2):
        assert sorted(orders[0][epoch] + orders[1][epoch]) == list(range(24))


def test_a_script_that_seeds_its_shuffle_has_its_seed() -> None:
    def order(seed: int, kind: str) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        weights: Any = torch.ones(24)
        data: Any = range(24)
        if kind == "shuffle":
            source = read_source(DataLoader(data, 2, shuffle=True, generator=generator), rank=0, ranks=1)
        else:
            sampler = WeightedRandomSampler(weights, 24, replacement=False, generator=generator)
            source = read_source(DataLoader(data, 2, sampler=sampler), rank=0, ranks=1)
        options: Any = {"shuffle": source.shuffle, "sampler": source.sampler, "seed": source.seed or 0}
        return flat(read(EngineLoader(data, batch_size=2, rank=0, world_size=1, **options)))

    for kind in ("shuffle", "weighted"):
        assert order(3, kind) == order(3, kind) != order(4, kind)


def test_a_look_at_a_batch_is_no_epoch() -> None:
    trained = 0
    loader = make("indices", NUMEL, 0, 1, 8, clock=lambda: trained)
    whole = read(make("indices", NUMEL, 0, 1, 8))
    next(iter(loader))
    for number, batch in enumerate(loader):
        assert batch.tolist() == whole[number]
        trained += 1
        if number == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (1, 24)
    again = make("indices", NUMEL, 0, 1, 8, clock=lambda: trained)
    again.load_state_dict(state)
    next(iter(again))
    assert read(again) == whole[3:], "the rest of the epoch, also after a look"


def test_a_pass_that_another_has_ended_goes_no_further() -> None:
    loader = make("indices", NUMEL, 0, 1, 8, clock=iter(range(100)).__next__)
    older = iter(loader)
    next(older)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="iterate over the loader anew"):
        next(older)
    older = iter(loader)
    next(older)
    loader.load_state_dict({"epoch": 1, "samples": 16})
    with pytest.raises(RuntimeError, match="a checkpoint was loaded"):
        next(older)
    assert loader.state_dict()["samples"] == 16


def test_data_of_another_length_begin_the_epoch_anew(capsys: pytest.CaptureFixture[str]) -> None:
    before = make("indices", 24, 0, 1, 4)
    read(before, 3)
    after = make("indices", 30, 0, 1, 4)
    after.load_state_dict(before.state_dict())
    assert (
        "an epoch had 24 samples in the run that wrote the checkpoint and has 30 now"
        in capsys.readouterr().out
    )
    assert sorted(flat(read(after))) == list(range(30)) and after.epoch == 1
    batches = make("batches", 24, 0, 1, 4)
    batches.load_state_dict(before.state_dict())
    assert "does not count batches" in capsys.readouterr().out
    assert sorted(flat(read(batches))) == list(range(24)) and batches.epoch == 1


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
    values += [torch.eye(2).to_sparse(), SimpleNamespace(x=1), SimpleNamespace(x=2), numpy.ones(1)]
    values += [numpy.array([[1], [2, 3]], dtype=object), torch.tensor([1j]).conj()]
    assert len({digest(each) for each in values}) == len(values)
    assert digest({"x": torch.arange(3)}) == digest({"x": torch.arange(3)})
    assert digest({"x": torch.arange(3)}) != digest({"x": torch.arange(1, 4)})


def test_the_epoch_behind_a_save_at_the_end_has_no_warning(capsys: Any) -> None:
    loader = EngineLoader(Stream(40), batch_size=4, rank=0, world_size=1)
    read(loader, 10)
    resumed = EngineLoader(Stream(40), batch_size=4, rank=0, world_size=1)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed) == [] and flat(read(resumed)) == [each ^ 1 for each in range(40)]
    assert "order" not in capsys.readouterr().out


def test_a_stream_resumes_on_other_numbers_of_ranks_without_a_warning(capsys: Any) -> None:
    loader = EngineLoader(Stream(40), batch_size=4, rank=0, world_size=2)
    read(loader, 2)
    resumed = EngineLoader(Stream(40), batch_size=4, rank=0, world_size=3)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed)[0] == [16, 19, 22, 25] and "order" not in capsys.readouterr().out


def test_a_stream_that_has_become_shorter_is_named(capsys: Any) -> None:
    loader = EngineLoader(Stream(40), batch_size=4, rank=0, world_size=1)
    read(loader, 8)
    shorter = EngineLoader(Stream(30), batch_size=4, rank=0, world_size=1)
    shorter.load_state_dict(loader.state_dict())
    assert read(shorter) == []
    assert (
        "Stream ends after 30 samples, before the position of the checkpoint, 32" in capsys.readouterr().out
    )


class Adding(Stream):
    """Keeps its epoch in shared memory, and adds to it, as Hugging Face's streams do."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.number = torch.zeros((), dtype=torch.int64).share_memory_()
        self.calls = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return int(self.number)

    def set_epoch(self, epoch: int) -> None:
        self.calls += 1
        self.number += epoch - self.number


def test_the_epoch_is_set_once_in_shared_memory() -> None:
    stream = Adding(24)
    options = LoaderOptions(num_workers=2, persistent_workers=True)
    loader = EngineLoader(stream, batch_size=4, rank=0, world_size=1, options=options)
    for epoch in range(4):
        assert flat(read(loader)) == [each ^ (epoch & 1) for each in range(24)]
    assert int(stream.calls) == 3  # it begins with epoch 0


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
        lambda: in_turn(engine.dataloader(Subset(data, range(rank, 24, 2)))),
        lambda: engine.dataloader(data, batch_size=0),
        lambda: engine.dataloader(iter(data)),
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
    assert not first[0] and "data loader 2 (Own): rank 1 reads other samples first than rank 0" in second[0]
    assert not first[1] and "other samples first" in second[1]
    assert "is for rank 1 of 4, this is data-parallel rank 0 of 2" in first[2]
    assert "a DataLoader has its own batch_size" in first[3]
    assert "data loader" in second[4] and "(Subset): rank 1 reads other samples" in second[4]
    assert "batch_size is 0: expected a whole number from 1 on" in second[5]
    assert "or torch's DataLoader, got range_iterator" in second[6]
    assert "_Mine yields the samples of one rank" in second[7]


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


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["shuffled", "weighted", "stream"])
def test_the_scripts_own_loader_resumes_inside_an_epoch(tmp_path: Path, kind: str) -> None:
    whole = run_workers(_train, 2, str(tmp_path / "whole"), kind, 0)
    begun = run_workers(_train, 2, str(tmp_path / "cut"), kind, 5)
    ended = run_workers(_train, 2, str(tmp_path / "cut"), kind, 0)
    assert [tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(begun, ended, strict=True)] == [
        tuple(each) for each in whole
    ], "to the bit"


@pytest.mark.rotated
@pytest.mark.parametrize("kind", ["shuffled", pytest.param("stream", marks=pytest.mark.exhaustive)])
def test_an_epoch_goes_on_with_other_numbers_of_ranks(tmp_path: Path, kind: str) -> None:
    seen: Counter[int] = Counter()
    for ranks, batches in ((3, 3), (2, 2), (4, 0)):  # 18 samples, 8, and the 22 that are left
        found = run_workers(_train, ranks, str(tmp_path), kind, batches)
        seen.update(flat([samples for samples, _ in found]))
    assert set(seen) == set(range(NUMEL)) and sum(seen.values()) <= NUMEL + 3


def _no_data() -> str:
    zlaunch.init_distributed()
    data: Any = torch.utils.data.TensorDataset(torch.ones(0, 1))
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(1, 1), config=config(1, 2), training_data=data)
    with pytest.raises(ParameterError) as refused:
        engine.train_batch(loss_fn=torch.nn.functional.mse_loss)
    return str(refused.value)


def test_data_without_a_sample_do_not_hang() -> None:
    assert "data loader 1 (TensorDataset) yields no micro-batch" in run_workers(_no_data, 1)[0]


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
    assert "data loader 1 (TensorDataset): a rank gets 6 micro-batches per epoch, but a step needs 8" in first
    assert "data loader" not in second
    assert "data loader" not in run_workers(_short_epochs, 2, 2, 6)[0]


def _worker_options() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for section in ({"persistent_workers": True}, {"persistent_workers": False}, {}):
            whole = {**config(1, 2), "data_loader": section}
            engine, *_ = zlaunch.initialize(model=torch.nn.Linear(1, 1), config=whole)
            engine.dataloader(TensorDataset(torch.arange(8.0)), num_workers=1)
            engine.dataloader(TensorDataset(torch.arange(8.0)))
    return said.getvalue()


def test_options_of_worker_processes_without_any_are_said() -> None:
    (said,) = run_workers(_worker_options, 1)
    assert said.count("data_loader.persistent_workers has no effect without workers") == 1
