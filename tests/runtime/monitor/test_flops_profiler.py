"""Test what the FLOPS profiler counts, beside torch's own counter on the plain model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zlaunch
from tests.runtime.workers import run_workers

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block())


FORWARD = 2 * 8 * (WIDTH * WIDTH + 2 * 2 * 4 * WIDTH * WIDTH)
"""Two operations for each of 8 rows and each weight."""


def _profiled(
    folder: str, stage: int, section: dict[str, Any], by_engine: bool = True
) -> tuple[str, list[Any]]:
    """Train three steps of two micro-batches; return what was printed and the reports."""
    zlaunch.init_distributed()
    path = Path(folder, f"events_{torch.distributed.get_rank()}")
    os.environ["ZLAUNCH_EVENT_FD"] = str(os.open(path, os.O_WRONLY | os.O_CREAT))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "flops_profiler": {"enabled": True, **section},
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, *_ = zlaunch.initialize(model=model(), config=config)
        for _ in range(6):
            with torch.no_grad():
                engine(torch.randn(8, WIDTH))
            loss = engine(torch.randn(8, WIDTH)).square().mean()
            if by_engine:
                engine.backward(loss)
            else:
                engine.scale(loss).backward()
            engine.step()
    os.environ.pop("ZLAUNCH_EVENT_FD", None)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return printed.getvalue(), [event["values"] for event in events if event["type"] == "metrics"]


@pytest.mark.parametrize("stage", [0, 3])
def test_operations_are_those_of_the_plain_model(stage: int, tmp_path: Path) -> None:
    plain = model()
    with FlopCounterMode(display=False) as counter:
        plain(torch.randn(8, WIDTH)).square().mean().backward()
    whole = counter.get_total_flops()
    (printed, reports), (other, others) = run_workers(_profiled, 2, str(tmp_path), stage, {})
    lines = printed.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if "FLOPs of" in line) :]
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    assert lines[0] == (
        f"zlaunch: FLOPs of a micro-batch in step 2: forward {FORWARD / 1e3:.3g} kFLOP, "
        f"backward {(whole - FORWARD) / 1e3:.3g} kFLOP; {parameters:,} parameters"
    )
    tree = [re.sub(r"  +", "  ", line) for line in lines if "%" in line]
    assert tree[0].startswith("  most at depth 1: ") and "Sequential: " in printed
    assert any(line.strip().startswith("(up) Linear: ") for line in lines)
    assert printed.count("FLOPs of a micro-batch") == 1 and "operations" not in other
    assert "tflops" not in reports[0] and reports[-1]["tflops"] > 0
    speed = reports[-1]["samples_per_s"] / 16 / 2 * 2  # micro-batches a second of a rank
    assert reports[-1]["tflops"] == pytest.approx(whole * speed / 1e12)
    assert not any("tflops" in values for values in others)


def test_less_is_shown_and_written_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    section = {
        "detailed": False,
        "top_modules": 2,
        "module_depth": 1,
        "profile_step": 2,
        "output_file": str(path),
    }
    ((printed, _),) = run_workers(_profiled, 1, str(tmp_path), 0, section)
    first, *rest = path.read_text().splitlines()
    assert "in step 3: " in first and "operations" not in printed
    assert len(rest) == 1 and re.fullmatch(r"  most at depth 1: [12] [\d.]+%, [12] [\d.]+%", rest[0])


def test_a_backward_pass_of_the_script_is_not_counted(tmp_path: Path) -> None:
    ((printed, reports),) = run_workers(_profiled, 1, str(tmp_path), 0, {}, False)
    assert "backward unknown: no engine.backward(loss) call" in printed
    assert "tflops" not in reports[-1] or reports[-1]["tflops"] > 0


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    ((printed, reports),) = run_workers(
        _profiled, 1, str(tmp_path), 0, {"output_file": str(tmp_path / "no" / "x")}
    )
    assert "flops_profiler.output_file" in printed and len(reports) == 3
