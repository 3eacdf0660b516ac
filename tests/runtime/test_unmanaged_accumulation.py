"""Test ``managed_gradient_accumulation: false``: every ``step()`` applies what the passes have left."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout, suppress
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed import install

COUNTS = (1, 3, 2)
"""Micro-batches of each step."""
MICRO = 2


def _plain(data: list[torch.Tensor], share: int) -> dict[str, torch.Tensor]:
    """SGD on the sums of the micro-batches' losses, each divided by ``share``."""
    model = net().double()
    rows = iter(data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for count in COUNTS:
        for _ in range(count):
            (loss_of(model, next(rows)) / share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _train(engine: Any, data: list[torch.Tensor], scale_wrt_gas: bool = True) -> dict[str, torch.Tensor]:
    rank, rows = engine.global_rank, iter(data)
    for count in COUNTS:
        for _ in range(count):
            own = next(rows)[rank * MICRO : (rank + 1) * MICRO]
            engine.backward(loss_of(engine, own), scale_wrt_gas=scale_wrt_gas)
        engine.step()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def _errors() -> dict[str, float]:
    join()
    install()
    import deepspeed

    data = batches(sum(COUNTS), 2 * MICRO)
    wanted = {share: _plain(data, share) for share in (1, 2)}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    more: dict[str, Any] = {"managed_gradient_accumulation": False, "optimizer": sgd}
    cases: list[tuple[str, Any, int, int, bool, dict[str, Any]]] = [
        *((f"stage {stage}", zlaunch.initialize, stage, 1, True, {}) for stage in range(4)),
        ("losses divided", deepspeed.initialize, 1, 2, True, {}),
        ("not divided", deepspeed.initialize, 2, 2, False, {}),
        ("offloaded", zlaunch.initialize, 2, 1, True, {"offload_optimizer": {"device": "cpu"}}),
    ]
    found = {}
    for name, call, stage, accumulation, divides, zero in cases:
        given = config(stage, MICRO, accumulation, zero=zero, **more)
        engine, *_ = call(model=net().double(), config=given)
        state = _train(engine, data, divides)
        right = wanted[accumulation if divides else 1]
        found[name] = max(float((state[key] - right[key]).abs().max()) for key in right)
        assert engine.global_steps == engine.micro_steps == 3
        assert engine.global_samples == sum(COUNTS) * 2 * MICRO
        # DeepSpeed's engine tells it only while step() runs
        assert engine.is_gradient_accumulation_boundary() is (call is zlaunch.initialize)
        with pytest.raises(RuntimeError, match=r"is false, so every engine\.step\(\) is a boundary"):
            engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(RuntimeError, match="without a backward pass"):
            engine.step()
        engine.destroy()
    with pytest.raises(zlaunch.ConfigError, match="train_batch"):
        zlaunch.initialize(model=net(), config=config(1, MICRO, 1, **more, pipeline={"partition": "uniform"}))
    stepping = {"step_in_backward": True}
    with pytest.raises(zlaunch.ConfigError, match=r"step_in_backward: .*managed_gradient_accumulation"):
        zlaunch.initialize(model=net(), config=config(2, MICRO, 1, zero=stepping, **more))
    return found


@pytest.mark.rotated
def test_the_script_decides_how_many_passes_a_step_has() -> None:
    for found in run_workers(_errors, 2):
        assert len(found) == 7
        assert {name: error for name, error in found.items() if not error < 1e-6} == {}
        assert all(found[f"stage {stage}"] < 1e-12 for stage in range(4))


def _count_by_hand() -> tuple[str, int, str, int]:
    """Return what two loops print, and how many steps they make: one counts by itself, one does not."""
    join()
    found: list[Any] = []
    for by_hand in (True, False):
        engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2, 2))
        with redirect_stdout(io.StringIO()) as printed:
            for tokens in batches(3, 8):
                for micro in tokens.split(4):
                    engine.backward(loss_of(engine, micro[engine.global_rank * 2 :][:2]))
                    if not by_hand:
                        engine.step()
                if by_hand:
                    engine.step()
        found += [printed.getvalue(), engine.global_steps]
        engine.destroy()
    first, steps, second, right = found
    return first, steps, second, right


def test_a_script_that_counts_beside_the_engine_is_told_once() -> None:
    (first, steps, second, right), (other, *_) = run_workers(_count_by_hand, 2)
    said = "engine.step() after 2 backward passes counts as one micro-batch of 2"
    assert (first.count(said), steps) == (1, 1) and said not in other
    assert (said not in second, right) == (True, 3)


def _drop_between() -> tuple[str, str]:
    """Return what is printed where zero_grad() comes after each micro-batch, and where after each step."""
    join()
    said = []
    for each in (True, False):
        engine, optimizer, *_ = zlaunch.initialize(model=net(), config=config(2, 2, 2))
        assert optimizer is not None
        with redirect_stdout(io.StringIO()) as printed:
            for tokens in batches(3, 8):
                for index, micro in enumerate(tokens.split(4)):
                    loss_of(engine, micro[engine.global_rank * 2 :][:2]).backward()
                    optimizer.step()
                    if each or index:
                        optimizer.zero_grad()
        said.append(printed.getvalue())
        engine.destroy()
    return said[0], said[1]


def test_a_script_that_drops_gradients_between_micro_batches_is_told_once() -> None:
    (each, after), (other, _) = run_workers(_drop_between, 2)
    assert each.count("engine.step() after 2 micro-batches has the gradients of 1: zero_grad() between") == 1
    assert "zero_grad" not in other + after


def _never_step() -> dict[str, list[str]]:
    """Return what loops print that make backward passes without a step() for each, by name: after the passes
    and at the end of the engine.
    """
    rank = join()
    data = batches(1, 4)[0].chunk(2)[rank]
    unmanaged: dict[str, Any] = {"managed_gradient_accumulation": False, "optimizer": {"type": "SGD"}}
    cases: dict[str, tuple[int, int, int, dict[str, Any]]] = {
        "forgotten": (3, 2, 6, {}),
        "forgotten for long": (3, 2, 70, {}),
        "many micro-batches": (2, 40, 70, {}),
        "one step": (3, 6, 6, {}),
        "several losses": (2, 1, 6, {}),
        "boundary": (2, 2, 6, {}),
        "no_sync": (1, 2, 6, {}),
        "dropped": (2, 2, 6, {}),
        "unmanaged": (2, 2, 6, unmanaged),
        "raised": (2, 2, 6, {}),
    }
    said = {}
    for name, (stage, accumulation, passes, more) in cases.items():
        engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 2, accumulation, **more))
        with redirect_stdout(io.StringIO()) as during:
            for index in range(passes):
                if name == "boundary":
                    engine.set_gradient_accumulation_boundary(index + 1 == passes)
                with engine.no_sync() if name == "no_sync" else nullcontext():
                    engine.backward(loss_of(engine, data))
                if name == "dropped":
                    engine.zero_grad()
            if name == "several losses":
                engine.step()
        with redirect_stdout(io.StringIO()) as at_end:
            if name == "raised":
                with suppress(KeyError):
                    try:
                        raise KeyError
                    finally:
                        engine.destroy()
            engine.destroy()
        said[name] = [during.getvalue(), at_end.getvalue()]
    return said


@pytest.mark.rotated
def test_a_script_that_never_steps_is_told_once() -> None:
    first, other = run_workers(_never_step, 2)
    assert other == {name: ["", ""] for name in first}, "only rank 0 says it"
    text = "zlaunch: warning: engine.backward() was called {} times and engine.step() never"
    assert first["forgotten"][0] == "", "it may still be one step of several losses"
    assert text.format(6) in first["forgotten"][1]
    assert "(gradient_accumulation_steps 2): call engine.step() after each" in first["forgotten"][1]
    assert first["forgotten for long"][0].count(text.format(64)) == 1 and first["forgotten for long"][1] == ""
    assert first["many micro-batches"][0] == "" and text.format(70) in first["many micro-batches"][1]
    for name in ("one step", "several losses", "boundary", "no_sync", "dropped", "unmanaged", "raised"):
        assert first[name] == ["", ""], name


def _pass_what_is_no_loss() -> list[str]:
    rank = join()
    engine, *_ = zlaunch.initialize(model=net(), config=config(2, 2))
    loss = loss_of(engine, batches(1, 4)[0].chunk(2)[rank])
    with pytest.raises(TypeError) as number:
        engine.backward(loss.item())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as shape:
        engine.backward(loss * torch.ones(4, 1, device=loss.device))
    engine.backward(loss.reshape(1, 1))
    engine.step()
    engine.destroy()
    return [str(number.value), str(shape.value)]


def test_a_loss_that_autograd_cannot_start_from_is_refused() -> None:
    [said] = run_workers(_pass_what_is_no_loss, 1)
    assert said == [
        "engine.backward needs the loss tensor, got float",
        "the loss has shape [4, 1]: reduce it, for example with loss.mean()",
    ]


def _step_the_schedule_by_hand() -> list[str]:
    """Return what loops print that leave the schedule to the engine, or step it as well."""
    join()
    said = []
    for scheduler in (None, {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}):
        for by_hand in (False, True):
            settings = config(1, 2, 1) | ({} if scheduler is None else {"scheduler": scheduler})
            given: dict[str, Any] = (
                {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)}
                if scheduler is None
                else {}
            )
            engine, _, _, schedule = zlaunch.initialize(model=net(), config=settings, **given)
            with redirect_stdout(io.StringIO()) as printed:
                for tokens in batches(3, 4):
                    engine.backward(loss_of(engine, tokens[engine.global_rank * 2 :][:2]))
                    engine.step()
                    if by_hand:
                        schedule.step()
            said.append(printed.getvalue())
            engine.destroy()
    return said


def test_a_script_that_steps_the_schedule_beside_the_engine_is_told_once() -> None:
    (first, ours, second, other), _ = run_workers(_step_the_schedule_by_hand, 2)
    said = "the script has stepped the "
    assert said not in first + second
    assert (ours.count(said + "StepLR"), other.count(said + "WarmupLR")) == (1, 1)
