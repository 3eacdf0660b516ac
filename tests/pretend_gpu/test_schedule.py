"""Test the order of gathers and reductions by the time that they would take on real GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def schedule(folder: Path, *options: str) -> dict[str, Any]:
    """Return the figures of `python -m benchmarks.schedule`, by system."""
    out = folder / "schedule.json"
    command = [sys.executable, "-m", "benchmarks.schedule", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())["results"]
    return found


@pytest.mark.exhaustive
def test_a_pass_exposes_as_little_as_that_of_fsdp2(tmp_path: Path) -> None:
    found = schedule(tmp_path)
    ours, theirs = found["zlaunch"], found["FSDP2"]
    # the embedding and the first layer: before them there is nothing to compute
    assert ours["waits_for_gathers"] == theirs["waits_for_gathers"] == 2
    assert ours["exposed_gathers_ms"] < 1.01 * theirs["exposed_gathers_ms"]
    assert ours["exposed_reductions_ms"] < 1.2 * theirs["exposed_reductions_ms"], (
        "the embedding's, at the end"
    )
    assert ours["pass_ms"] < theirs["pass_ms"], "parameters and gradients are not copied to be sent"
    assert ours["gathers_ms"] == pytest.approx(theirs["gathers_ms"], rel=0.01)
    assert ours["reductions_ms"] == pytest.approx(theirs["reductions_ms"], rel=0.01)


@pytest.mark.exhaustive
def test_without_prefetch_all_gathers_are_exposed(tmp_path: Path) -> None:
    ours = schedule(tmp_path, "--prefetch", "0")["zlaunch"]
    assert ours["exposed_gathers_ms"] == pytest.approx(ours["gathers_ms"], rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_uploads_run_beside_compute(tmp_path: Path, device: str) -> None:
    ours = schedule(tmp_path, "--offload", device)["zlaunch"]
    uploads_and_gathers = ours["gathers_ms"]
    assert uploads_and_gathers > 150
    # of the embedding and the first layer
    assert ours["exposed_gathers_ms"] < uploads_and_gathers / 20
    assert ours["pass_ms"] < 1.01 * schedule(tmp_path)["zlaunch"]["pass_ms"]
