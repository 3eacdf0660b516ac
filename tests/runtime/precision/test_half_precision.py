"""Test fp16 and bf16: master weights, loss scaling, skipped steps, and what happens when nothing helps."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, train_engine, train_plain
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.errors import LossScaleFloorError


def _all_losses(section: str, accumulation: int) -> list[tuple[list[float], list[float]]]:
    zlaunch.init_distributed()
    return [_losses(stage, section, accumulation) for stage in range(4)]


def _losses(stage: int, section: str, accumulation: int) -> tuple[list[float], list[float]]:
    world = torch.distributed.get_world_size()
    data = batches(4, 8 * accumulation) * 6
    plain = train_plain(net(), data)
    enabled: dict[str, Any] = {section: {"enabled": True}}
    settings = config(stage, 8 // world, accumulation, **enabled)
    engine, *_ = zlaunch.initialize(model=net(), config=settings)
    assert {p.dtype for p in engine.module.parameters()} == {
        torch.bfloat16 if section == "bf16" else torch.float16
    }
    mine = torch.tensor(train_engine(engine, data)) / world
    torch.distributed.all_reduce(mine)
    return plain, mine.tolist()


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("section", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_curve_within_one_percent(section: str, accumulation: int) -> None:
    for plain, mine in run_workers(_all_losses, 2, section, accumulation)[0]:
        skipped = next(i for i in range(len(plain)) if mine[i] != mine[0]) - 1 if section == "fp16" else 0
        assert mine[skipped:] == pytest.approx(plain[: len(plain) - skipped], rel=0.01)
        assert plain[-1] < 0.95 * plain[0]


def _overflow_on_one_rank(stage: int) -> dict[str, object]:
    rank = join()
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 2, fp16=fp16))
    before = {n: p.clone() for n, p in engine.module.state_dict().items()}
    scales = [engine.loss_scale]
    for step, batch in enumerate(batches(3, 4)):
        loss = loss_of(engine, batch.chunk(2)[rank])
        engine.backward(loss * float("inf") if step == 0 and rank == 1 else loss)
        engine.step()
        if step == 0:
            after = engine.module.state_dict()
            unchanged = all(torch.equal(after[n], before[n]) for n in before)
            norm = engine.get_global_grad_norm()
        scales.append(engine.loss_scale)
    changed = any(not torch.equal(v, before[n]) for n, v in engine.module.state_dict().items())
    return {
        "unchanged": unchanged,
        "norm": norm,
        "changed": changed,
        "skipped": engine.skipped_steps,
        "scales": scales,
        "overflow": engine.overflow,
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_on_one_rank_skips_on_all(stage: int) -> None:
    results = run_workers(_overflow_on_one_rank, 2, stage)
    for result in results:
        assert result["unchanged"] and result["changed"] and not result["overflow"]
        assert not math.isfinite(result["norm"])
        assert result["skipped"] == 1
        assert result["scales"] == [256, 128, 128, 128]


def _floor(zero: dict[str, Any]) -> str:
    zlaunch.init_distributed()
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=config(2, 2, fp16=fp16, zero=zero))
    engine.backward(loss_of(engine, batches(1, 2)[0]))
    engine.step()
    assert not engine.overflow, "at the smallest scale, finite gradients are stepped"
    loss = model.norm.weight.float().sum() * float("nan") + loss_of(engine, batches(1, 2)[0])
    engine.backward(loss)
    with pytest.raises(LossScaleFloorError) as caught:
        engine.step()
    return str(caught.value)


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_floor_names_the_parameters(tmp_path: Path, device: str) -> None:
    zero = {"offload_optimizer": {"device": device, "nvme_path": str(tmp_path)}} if device != "none" else {}
    for text in run_workers(_floor, 2, zero):
        assert "norm.weight" in text and "minimum" in text
        assert device != "none" or "layers.0" not in text


def _plain_backward(stage: int) -> list[tuple[float | None, float | None]]:
    """``loss.backward()`` straight on the loss is scaled like ``engine.backward``."""
    rank = join()
    settings = config(stage, 2, fp16={"enabled": True, "loss_scale": 1024})
    norms = []
    engines = [zlaunch.initialize(model=net(), config=settings)[0] for _ in range(2)]
    for batch in batches(3, 4):
        mine = batch.chunk(2)[rank]
        engines[0].backward(loss_of(engines[0], mine))
        loss_of(engines[1], mine).backward()
        for engine in engines:
            engine.step()
        norms.append((engines[0].get_global_grad_norm(), engines[1].get_global_grad_norm()))
    return norms


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_backward_is_scaled_too(stage: int) -> None:
    for with_engine, straight in run_workers(_plain_backward, 2, stage)[0]:
        assert straight == pytest.approx(with_engine, rel=0.01)


@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0)])
def test_a_scale_that_fp16_does_not_have(scale: float | torch.Tensor) -> None:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 2, fp16={"enabled": True}))
    engine._sharded.loss_scaling.factor = lambda: scale
    engine._sharded._begin_backward = lambda: None  # type: ignore[method-assign]
    grad = engine._sharded._at_output(torch.full((3,), 2.0**-10, dtype=torch.float16))
    assert grad is not None and grad.dtype == torch.float16 and grad.tolist() == [64.0] * 3
    engine.destroy()


def _options(extra: dict[str, Any]) -> list[float]:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(2, 2, **extra))
    return train_engine(engine, batches(6, 4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "extra",
    [
        {"prescale_gradients": True},
        {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
        {"communication_data_type": "bf16"},
    ],
)
def test_ways_to_reduce_do_not_change_training(extra: dict[str, object]) -> None:
    assert run_workers(_options, 2, extra)[0] == pytest.approx(run_workers(_options, 2, {})[0], rel=5e-3)


def _from_bf16(kind: str) -> str:
    zlaunch.init_distributed()
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    model = net()
    if kind == "values":
        model.to(torch.bfloat16)
    elif kind == "config":
        model.config = types.SimpleNamespace(dtype=torch.bfloat16)  # type: ignore[assignment]  # as transformers
    engine, *_ = zlaunch.initialize(model=model, config=config(2, 1, fp16=fp16))
    loss = loss_of(engine, batches(1, 1)[0])
    engine.backward(loss * float("nan"))
    with pytest.raises(LossScaleFloorError) as caught:
        engine.step()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["values", "config", "neither"])
def test_a_model_trained_in_bf16_that_overflows_in_fp16_is_told_so(kind: str) -> None:
    (text,) = run_workers(_from_bf16, 1, kind)
    hint = "the model is in bf16, and fp16 cannot represent values above 65504"
    assert "at the minimum loss scale" in text
    assert (hint in text) == (kind != "neither")
