"""Test what losses and gradients are divided by: ranks of each axis, micro-batches, prescaling."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error
from tests.runtime.sequence_parallel.test_scripts import Attention
from tests.runtime.workers import join, run_workers
from zlaunch import sequence
from zlaunch.runtime import step_losses
from zlaunch.runtime.device import HostCopy
from zlaunch.runtime.step_losses import StepLosses

RATE = 0.1
SAMPLES, TOKENS, WIDTH = 4, 6, 8
"""Four micro-batches of one sample: two for each of the two ranks of the data axis."""
SETTINGS: list[dict[str, Any]] = [
    {"gradient_allreduce_op": operation, "prescale_gradients": prescale}
    for operation in ("mean", "sum")
    for prescale in (False, True)
]


def _model(calls: bool) -> Attention:
    torch.manual_seed(3)
    return Attention(calls).double()


def _data() -> Tensor:
    numbers = torch.Generator().manual_seed(4)
    return torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=numbers)


def _train_with_sequence_axis(settings: dict[str, Any], stage: int) -> tuple[Tensor, float]:
    """Return the weight after a step, and the loss that monitors are given."""
    engine, *_ = zlaunch.initialize(
        model=_model(calls=True),
        config=config(stage, 1, 2, optimizer={"type": "SGD", "params": {"lr": RATE}}, **settings)
        | {"parallel": {"sequence": 2}},
    )
    for micro in range(2):
        tokens = _data()[engine.data_parallel_rank * 2 + micro].unsqueeze(0)
        engine.backward(sequence.mean(engine(sequence.split(tokens)).square()))
        engine.step()
    loss = engine.step_metrics()["train_loss"]
    weight: Tensor = engine.module.state_dict()["inner.weight"].clone()
    engine.destroy()
    return weight, float(loss)


def _train_all_settings() -> list[tuple[Tensor, float]]:
    join()
    return [_train_with_sequence_axis(settings, number % 2) for number, settings in enumerate(SETTINGS)]


def test_data_and_sequence_axes_and_micro_batches() -> None:
    """With "sum", too, ranks of the sequence axis have parts of one gradient."""
    for rank, found in enumerate(run_workers(_train_all_settings, 4)):
        for settings, (weight, loss) in zip(SETTINGS, found, strict=True):
            plain = _model(calls=False)
            losses = [plain(_data()[sample].unsqueeze(0)).square().mean() for sample in range(SAMPLES)]
            data_ranks = 2 if settings["gradient_allreduce_op"] == "mean" else 1
            (torch.stack(losses).sum() / 2 / data_ranks).backward()
            assert plain.inner.weight.grad is not None
            wanted = plain.inner.weight.detach() - RATE * plain.inner.weight.grad
            assert relative_error(weight, wanted) < 1e-12, (rank, settings)
            mean = torch.stack(losses).mean().item()
            assert loss == pytest.approx(mean, rel=1e-12), "of all ranks and micro-batches"


def _train_one_bit(prescale: bool) -> Tensor:
    """Train by signs from the third step on, with two backward passes a step; return the weights."""
    engine, *_ = zlaunch.initialize(
        model=net(),
        config=config(
            0, 2, prescale_gradients=prescale, optimizer={"type": "OneBitAdam", "params": {"freeze_step": 2}}
        ),
    )
    half = engine.global_rank * 2
    for tokens in batches(5, 8):
        engine.backward(loss_of(engine, tokens[half : half + 2]))
        engine.backward(loss_of(engine, tokens[half + 4 : half + 6]))
        engine.step()
    state = engine.module.state_dict()
    return torch.cat([value.reshape(-1) for value in state.values()])


def _train_with_and_without_prescaling() -> tuple[Tensor, Tensor]:
    join()
    return _train_one_bit(prescale=False), _train_one_bit(prescale=True)


def test_prescaling_leaves_what_a_rank_keeps() -> None:
    """A 1-bit optimizer's own gradient of two passes was divided once more for each pass."""
    for without, prescaled in run_workers(_train_with_and_without_prescaling, 2):
        assert without.equal(prescaled), "two is a power of two: dividing by it rounds nothing"


SAME = "the losses of all 2 data-parallel ranks were identical for 3 steps"


def _train_on(kind: str) -> str:
    """Return what this rank has printed."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        _train_alike(kind)
    return printed.getvalue()


def _train_alike(kind: str) -> None:
    rank = join()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2))
    for step, tokens in enumerate(batches(5, 4)):
        differs = kind == "own" or (kind == "sometimes" and step % 3 == 2)
        own = tokens[rank * 2 : rank * 2 + 2] if differs else tokens[:2]
        engine.backward(loss_of(engine, own))
        engine.step()


def test_ranks_that_train_on_the_same_samples_are_told_once() -> None:
    for kind, count in (("same", 1), ("own", 0), ("sometimes", 0)):
        assert [text.count(SAME) for text in run_workers(_train_on, 2, kind)] == [count, 0], kind


class _Late(HostCopy):
    """Arrives on the host one look later, as a copy from a GPU may."""

    looks = 0

    @property
    def has_arrived(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_all_ranks_send_as_many_numbers_whatever_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [StepLosses(torch.device("cpu"), rank=rank, world_size=2, samples=2) for rank in range(2)]
    for _ in range(25):
        for losses in ranks:
            losses.note(torch.tensor(1.0))
        both = [losses.numbers() for losses in ranks]
        for kind, losses in zip((HostCopy, _Late), ranks, strict=True):
            monkeypatch.setattr(step_losses, "HostCopy", kind)
            losses.take(torch.stack(both).sum(0))  # fails where one has other numbers than the other


def _train_and_drop() -> list[float]:
    """Return the mean losses of steps before which one micro-batch was dropped, and those that count."""
    join()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2, 2))
    found: list[float] = []
    for drop in (engine.zero_grad, engine.module.zero_grad):
        kept: list[float] = []
        for number, tokens in enumerate(batches(3, 4)):
            loss = loss_of(engine, tokens[engine.global_rank * 2 :][:2])
            engine.backward(loss)
            if number == 0:
                drop()
                continue
            kept.append(loss.item())
            engine.step()
        found += [float(engine.step_metrics()["train_loss"]), sum(kept) / 2]
    return found


def test_a_dropped_micro_batch_is_in_no_mean() -> None:
    ranks = run_workers(_train_and_drop, 2)
    for shown, *own in zip(*[ranks[0][::2], *(rank[1::2] for rank in ranks)], strict=True):
        assert shown == pytest.approx(sum(own) / 2, rel=1e-6)


def _train_on_divided_losses() -> list[float]:
    """Return the mean losses of two steps whose losses the script divides, and what they are."""
    join()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2, 2))
    found: list[float] = []
    for _ in range(2):
        losses = []
        for tokens in batches(2, 4):
            losses.append(loss_of(engine, tokens[engine.global_rank * 2 :][:2]))
            engine.backward(losses[-1] / 2, scale_wrt_gas=False)
            engine.step()
        found += [float(engine.step_metrics()["train_loss"]), sum(loss.item() for loss in losses) / 2]
    return found


def test_the_loss_of_a_step_whose_micro_batches_the_script_divides() -> None:
    ranks = run_workers(_train_on_divided_losses, 2)
    for shown, *own in zip(*[ranks[0][::2], *(rank[1::2] for rank in ranks)], strict=True):
        assert shown == pytest.approx(sum(own) / 2, rel=1e-6)


def test_losses_that_share_some_bits_are_not_equal(capsys: pytest.CaptureFixture[str]) -> None:
    for difference, count in ((2**-20, 0), (0.0, 1)):
        ranks = [StepLosses(torch.device("cpu"), rank=rank, world_size=2, samples=2) for rank in range(2)]
        for _ in range(4):
            for rank, losses in enumerate(ranks):
                losses.note(torch.tensor(1.0 + rank * difference))
            sums = torch.stack([losses.numbers() for losses in ranks]).sum(0)
            for losses in ranks:
                losses.take(sums)
        assert capsys.readouterr().out.count(SAME) == count
