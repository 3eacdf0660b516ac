"""Test on one GPU that every step's metrics and times are written, once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import zlaunch
from tests.runtime.models import batches, config, net, train_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_every_step_is_written_once(section: str, tmp_path: Path) -> None:
    zlaunch.init_distributed()
    settings: dict[str, Any] = {
        section: {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "wall_clock_breakdown": True,
    }
    engine, *_ = zlaunch.initialize(model=net(), config=config(2, 4, **settings))
    losses = train_engine(engine, batches(5, 4))
    engine.destroy()
    names = ["lr", "grad_norm", "train_loss", *(f"elapsed_time_ms_{part}" for part in ("forward", "step"))]
    for name in names + ["loss_scale"] * (section == "fp16"):
        with (tmp_path / "job" / f"Train_Samples_{name}.csv").open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        assert [int(row[0]) for row in rows] == [4, 8, 12, 16, 20]
        assert name == "grad_norm" or all(float(row[1]) > 0 for row in rows)
        if name == "train_loss":
            assert [float(row[1]) for row in rows] == pytest.approx(losses)
