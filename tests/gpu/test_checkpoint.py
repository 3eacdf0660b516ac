"""Test checkpoints of an engine on a GPU: from device memory, through page-locked snapshots, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.checkpoint.test_save_load import content, differences
from tests.runtime.models import batches, config, net, train_engine

pytestmark = pytest.mark.gpu


def train(engine: Any, first: int, last: int) -> list[float]:
    return train_engine(engine, batches(last, 4)[first:last])


def engine_of(stage: int, **options: Any) -> Any:
    zlaunch.init_distributed()
    return zlaunch.initialize(model=net(), config=config(stage, 4, clip=0.5, **options))[0]


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"bf16": {"enabled": True}}),
    (2, {"fp16": {"enabled": True}}),
    (2, {"bf16": {"enabled": True}, "zero": OFFLOAD}),
    (3, {"bf16": {"enabled": True}}),
    (3, {"zero": {**OFFLOAD, "offload_param": {"device": "cpu"}}}),
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("stage", "options"), CASES)
def test_every_setting_loads_what_another_has_saved(
    tmp_path: Path, stage: int, options: dict[str, Any], asynchronous: bool
) -> None:
    engine = engine_of(stage, **options, checkpoint={"asynchronous": asynchronous})
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path, tag="first")
    train(engine, 3, 5)  # while it is written
    engine.wait_for_checkpoint()
    engine.destroy()
    first = content(tmp_path / "first")
    for other, more in CASES:
        engine = engine_of(other, **more)
        engine.load_checkpoint(tmp_path, tag="first")
        engine.save_checkpoint(tmp_path, tag="second")
        assert differences(first, content(tmp_path / "second")) == []
        train(engine, 3, 4)
        engine.destroy()


@pytest.mark.parametrize(("stage", "options"), CASES)
def test_training_goes_on(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    engine = engine_of(stage, **options)
    straight = train(engine, 0, 10)
    engine.destroy()
    engine = engine_of(stage, **options)
    begun = train(engine, 0, 5)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = engine_of(stage, **options)
    engine.load_checkpoint(tmp_path)
    assert begun + train(engine, 5, 10) == pytest.approx(straight, rel=1e-3)
    engine.destroy()


def test_snapshots_are_page_locked(tmp_path: Path) -> None:
    engine = engine_of(2, checkpoint={"asynchronous": True})
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    statistics = engine.checkpoints._link.pool.statistics()
    assert statistics.pinned_bytes == statistics.held_bytes > 0
    assert torch.cuda.is_available()
    engine.destroy()
