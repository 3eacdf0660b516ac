"""Test that ranks with the same batch, and batches that come again after a resume, are noticed."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import join, run_workers
from zlaunch.runtime import batch_watch
from zlaunch.runtime.batch_watch import BatchWatch
from zlaunch.runtime.device import HostCopy
from zlaunch.runtime.mesh import MeshShape

STEPS = 6
SAME = re.compile(
    r"data-parallel ranks ([\d, and]+) trained on the same batch in the 3 steps up to step (\d+)"
)
AGAIN = re.compile(r"steps (\d+) to (\d+) trained on the batches of steps (\d+) to (\d+) again")


def _printed(train: Any, *args: Any) -> str:
    """Return what this rank has printed."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        train(*args)
    return printed.getvalue()


# -- ranks


def _own_part(kind: str, step: int, place: int) -> int:
    """Return which quarter of a global batch a data-parallel rank takes."""
    if kind == "same":
        return 0
    if kind == "two" and place == 3:
        return 1
    if kind == "sometimes" and step % 3 != 2:
        return 0
    return place


def _train_with_shares(kind: str) -> None:
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2))
    place = engine.data_parallel_rank
    for step, tokens in enumerate(batches(STEPS, 8)):
        own = tokens.chunk(4)[_own_part(kind, step, place)]
        engine.backward(loss_of(engine, own.to(engine.device)))
        engine.step()
    engine.destroy()


class _OfGrid(nn.Module):
    """Computes with an input that never changes, and draws what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.layer(points + torch.randn(4, device=points.device)).square().mean()


def _train_on_a_grid() -> None:
    engine, *_ = zlaunch.initialize(model=_OfGrid(), config=config(0, 1))
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(2, 4, device=engine.device)))
        engine.step()
    engine.destroy()


def _train_without_tensors() -> None:
    class Own(_OfGrid):
        def forward(self, points: Any) -> Tensor:
            return super().forward(torch.full((2, 4), float(points), device=self.layer.weight.device))

    engine, *_ = zlaunch.initialize(model=Own(), config=config(0, 1))
    for step in range(STEPS):
        engine.backward(engine(step))
        engine.step()
    engine.destroy()


class _OfMany(_OfGrid):
    """Has inputs of which ranks have a part in common: columns, larger tensors, or what is seen at all."""

    def forward(self, points: Tensor, **others: Any) -> Tensor:
        return super().forward(points.reshape(-1, 4)[:2])


def _train_with_parts_in_common(kind: str) -> None:
    engine, *_ = zlaunch.initialize(model=_OfMany(), config=config(0, 1))
    own = torch.Generator().manual_seed(engine.global_rank)
    for step in range(STEPS):
        drawn = torch.randn(4096, 4, generator=own)
        drawn[:, 0] = step
        others: dict[str, Any] = {}
        if kind == "larger":
            others = {f"calendar {number}": torch.full((8192, 4), step) for number in range(3)}
        elif kind == "unseen":
            others = {"more": [f"a sentence of rank {engine.global_rank}"]}
            drawn = torch.full((2, 4), float(step))
        elif kind == "object":
            others = {"more": object()}
            drawn = torch.full((2, 4), float(step))
        elif kind == "expanded":
            drawn = drawn[:, 1:2].expand(-1, 4)
        given = {
            name: each.to(engine.device) if isinstance(each, Tensor) else each
            for name, each in others.items()
        }
        engine.backward(engine(drawn.to(engine.device), **given))
        engine.step()
    engine.destroy()


def _train_on_too_few_samples() -> None:
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 1))
    loader = engine.dataloader(batches(1, 3)[0])  # type: ignore[arg-type]  # it has what it takes
    for _ in range(STEPS):
        for tokens in loader:
            engine.backward(loss_of(engine, tokens.to(engine.device)))
            engine.step()
    engine.destroy()


PARTS = ("columns", "larger", "unseen", "object", "expanded")


def _train_all() -> dict[str, str]:
    join()
    parts = {kind: _printed(_train_with_parts_in_common, kind) for kind in PARTS}
    parts["too few"] = _printed(_train_on_too_few_samples)
    found = {kind: _printed(_train_with_shares, kind) for kind in ("own", "same", "two", "sometimes")}
    return {
        **found,
        **parts,
        "grid": _printed(_train_on_a_grid),
        "no tensors": _printed(_train_without_tensors),
    }


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_ranks_with_the_same_batch_are_named_once() -> None:
    wanted = {"same": [("0, 1, 2 and 3", "3")], "two": [("1 and 3", "3")]}
    first, *others = run_workers(_train_all, 4)
    for kind, printed in first.items():
        assert SAME.findall(printed) == wanted.get(kind, []), kind
    assert not any(SAME.search(printed) for other in others for printed in other.values())


def _train_in_groups(kind: str) -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    axes = {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": plan}}
    engine, *_ = zlaunch.initialize(model=net(), config={**config(1, 2), **axes})
    for step, tokens in enumerate(batches(STEPS, 8)):
        own = tokens.chunk(4)[_own_part(kind, step, engine.data_parallel_rank)]
        engine.backward(loss_of(engine, own.to(engine.device)))
        engine.step()
    engine.destroy()


def _train_all_in_groups() -> dict[str, str]:
    join()
    return {kind: _printed(_train_in_groups, kind) for kind in ("same", "own")}


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_groups_that_share_layers_count_as_one_rank() -> None:
    found = run_workers(_train_all_in_groups, 4)[0]
    assert SAME.findall(found["same"]) == [("0 and 1", "3")]
    assert not SAME.search(found["own"])


class _Late(HostCopy):
    """Arrives on the host one look later, as a copy from a GPU may."""

    looks = 0
    is_done = False

    @property
    def has_arrived(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_all_ranks_send_as_many_numbers_whatever_has_arrived(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = torch.device("cpu")
    ranks = [BatchWatch(device, rank=rank, mesh=MeshShape(2)) for rank in range(2)]
    for step in range(1, 210):
        for each in ranks:
            each.note(torch.full((4,), step))
        both = [each.numbers() for each in ranks]
        sums = torch.stack(both).sum(0)  # fails where one has other numbers than the other
        for kind, each in zip((HostCopy, _Late), ranks, strict=True):
            monkeypatch.setattr(batch_watch, "HostCopy", kind)
            each.take(sums, step, is_shared_out=False)
    assert [found.group(2) for found in SAME.finditer(capsys.readouterr().out)] == ["3"]
    states = [each.state() for each in ranks]
    assert states[0] is not None and states[1] is not None
    assert states[0]["last_step"] == states[1]["last_step"] == 209
    assert states[0]["sums"].equal(states[1]["sums"]), "nothing that arrives late is lost"
    assert len(states[0]["sums"].unique()) == 209


def test_inputs_that_cannot_be_read_are_unknown() -> None:
    watch = BatchWatch(torch.device("cpu"), rank=0, mesh=MeshShape(1))
    ones = torch.ones(4, 4)
    unknown = (ones.to_sparse(), torch.nested.nested_tensor([ones, ones[:2]]), object(), ["text"])
    for each in (*unknown, torch.empty(4, device="meta"), ones.to(torch.float8_e5m2)):
        watch.note((ones, {"other": each}))
        assert watch.numbers().tolist() == [0.0], each
        watch.clear()

    def noted(row: Tensor) -> Tensor:
        watch.note(row)
        return row

    torch.func.vmap(noted)(ones)
    assert watch.numbers().tolist() == [0.0]
    watch.clear()
    numbers = set()
    for known in (ones, ones.bool(), ones.to(torch.complex64), ones[:, :2].T, ones[:1].expand(3, 4)):
        watch.note((known, None, 3, torch.empty(0)))
        numbers |= set(watch.numbers().tolist())
        watch.clear()
    assert len(numbers) == 5
    assert 0.0 not in numbers


def test_unknown_batches_repeat_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for is_known in (False, True):
        state = None
        for _ in range(2):
            watch = BatchWatch(torch.device("cpu"), rank=0, mesh=MeshShape(1))
            watch.load_state(state)
            for step in range(3):
                watch.note((torch.full((4,), step), None if is_known else "text"))
                watch.take(watch.numbers(), step + 1, is_shared_out=False)
            state = watch.state()
        assert len(AGAIN.findall(capsys.readouterr().out)) == is_known


# -- resumes


def _stream(kind: str, begin: int, count: int) -> Iterator[Tensor]:
    """Yield the global batches of steps, as a script reads them after it has resumed."""
    data = batches(12, 4)
    for number in range(begin, begin + count):
        if kind == "restarts":
            yield data[number - begin]
        elif kind == "epochs":
            yield data[number % 3]
        elif kind == "later epoch":
            yield data[number % 8]
        elif kind == "twice each":
            yield data[(number - begin) // 2]
        elif kind == "another order":
            yield data[number if begin == 0 else (4, 1, 3, 0, 2)[number - begin]]
        elif kind == "one again":
            yield data[0 if number == begin + 1 else number]
        else:
            yield data[number]


def _run(folder: str, kind: str, begin: int, count: int) -> None:
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2))
    if begin:
        engine.load_checkpoint(folder)
    assert engine.global_steps == begin
    if kind == "loader":
        data = torch.stack(batches(1, 24)[0].chunk(24)).squeeze(1)
        loader = engine.dataloader(data, shuffle=False)  # type: ignore[arg-type]  # it has what it takes
        epochs = (batch for _ in range(2) for batch in loader)
        for batch, _ in zip(epochs, range(count), strict=False):
            engine.backward(loss_of(engine, batch.to(engine.device)))
            engine.step()
    else:
        for tokens in _stream(kind, begin, count):
            own = tokens.chunk(2)[engine.data_parallel_rank]
            engine.backward(loss_of(engine, own.to(engine.device)))
            engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


KINDS = ("goes on", "restarts", "epochs", "later epoch", "twice each", "another order", "one again", "loader")


def _runs(folder: str, begin: int, count: int) -> dict[str, str]:
    join()
    return {kind: _printed(_run, f"{folder}/{kind}", kind, begin, count) for kind in KINDS}


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_data_that_restart_after_a_resume_are_reported_with_their_steps(tmp_path: Path) -> None:
    for printed in run_workers(_runs, 2, str(tmp_path), 0, 6)[0].values():
        assert not AGAIN.search(printed)
    first, second = run_workers(_runs, 2, str(tmp_path), 6, 5)
    for kind, printed in first.items():
        wanted = [("7", "9", "1", "3")] if kind in ("restarts", "twice each") else []
        assert AGAIN.findall(printed) == wanted, kind
    assert not any(AGAIN.search(printed) for printed in second.values())
