"""Test what losses and gradients are divided by: ranks of each axis, micro-batches, prescaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error
from tests.runtime.sequence_parallel.test_scripts import Attention
from tests.runtime.workers import join, run_workers
from zlaunch import sequence

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
