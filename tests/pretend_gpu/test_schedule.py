"""Test the order of gathers and reductions by the time that they would take on real GPUs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def schedule(*options: str, module: str = "schedule") -> dict[str, Any]:
    """Return the figures of `python -m benchmarks.schedule`, or of another module, by system."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "schedule.json")
        command = [sys.executable, "-m", f"benchmarks.{module}", "--out", str(out), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(out.read_text())["results"]
    return found


@pytest.mark.exhaustive
def test_a_step_exposes_less_than_that_of_fsdp2() -> None:
    found = schedule()
    ours, theirs = found["zlaunch"], found["FSDP2"]
    assert theirs["waits_for_gathers"] == 2, (
        "for the embedding and the first layer, after the optimizer's step"
    )
    assert theirs["exposed_gathers_ms"] > 3
    assert ours["exposed_gathers_ms"] < 0.5, "they are gathered beside the optimizer's step"
    assert ours["exposed_reductions_ms"] < 1.2 * theirs["exposed_reductions_ms"], (
        "the embedding's, at the end"
    )
    assert ours["step_ms"] < theirs["step_ms"], "parameters and gradients are not copied to be sent"
    assert ours["gathers_ms"] == pytest.approx(theirs["gathers_ms"], rel=0.01)
    assert ours["reductions_ms"] == pytest.approx(theirs["reductions_ms"], rel=0.01)


@pytest.mark.exhaustive
def test_without_prefetch_all_gathers_are_exposed() -> None:
    ours = schedule("--prefetch", "0")["zlaunch"]
    assert ours["exposed_gathers_ms"] == pytest.approx(ours["gathers_ms"], rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_uploads_run_beside_compute(device: str) -> None:
    ours = schedule("--offload", device)["zlaunch"]
    uploads_and_gathers = ours["gathers_ms"]
    assert uploads_and_gathers > 150
    # of the embedding and the first layer
    assert ours["exposed_gathers_ms"] < uploads_and_gathers / 20
    assert ours["step_ms"] < 1.01 * schedule()["zlaunch"]["step_ms"]


@pytest.mark.exhaustive
def test_sums_of_tensor_parallelism_run_beside_gradients_of_weights() -> None:
    found = schedule("--layers", "4", module="tensor_schedule")
    ours = found["overlapped"]
    plain = found["at_once"]
    assert ours["collectives_ms"] == pytest.approx(plain["collectives_ms"])
    assert plain["exposed_ms"] == pytest.approx(plain["collectives_ms"], rel=0.01)
    saved = plain["exposed_ms"] - ours["exposed_ms"]
    assert saved == pytest.approx(plain["pass_ms"] - ours["pass_ms"], rel=0.01)
    # A layer has four sums. Hidden are the one for the input of gate and up, and a part of the one for query,
    # key and value; the two of the forward pass are not.
    assert saved > 0.25 * plain["collectives_ms"]
