"""Test that the benchmark of the host's time trains every system, as one rank of several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.exhaustive
def test_every_system_is_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.host_time", "--layers", "2", "--rounds", "1", "--steps", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index('{\n "ms"') :])
    assert list(found["ms"]) == ["torch", "stage 0", "stage 1", "stage 2", "stage 3", "fsdp2"]
    assert all(ms > 0 for ms in found["ms"].values())
