"""Test zlaunch.notebook: functions of the calling program in fresh workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S

PROGRAM = """
import os, sys, threading
import torch, zlaunch

torch.randn(500, 500) @ torch.randn(500, 500)  # threads that a fork would not survive
scale = 3


class Own:
    def __init__(self, value):
        self.value = value


def train(own, fail=False):
    import torch.distributed as dist

    zlaunch.init_distributed()
    print("hello from", dist.get_rank(), flush=True)
    if fail and dist.get_rank() == 1:
        raise ValueError("bad luck")
    tensor = torch.ones(2) * scale
    dist.all_reduce(tensor)
    return dist.get_rank(), Own(own.value + 1), tensor.tolist(), os.getpid()


results = zlaunch.notebook(train, Own(4), num_gpus=2)
found = [(rank, own.value, values) for rank, own, values, _ in results]
assert found == [(0, 5, [6.0, 6.0]), (1, 5, [6.0, 6.0])], found
assert os.getpid() not in [pid for *_, pid in results]
try:
    zlaunch.notebook(train, Own(4), fail=True, num_gpus=2)
except ValueError as error:
    assert str(error) == "bad luck" and "rank 1 of " in str(error.__cause__), error.__cause__
    print("raised")
try:
    zlaunch.notebook(train, threading.Lock())
except TypeError as error:
    print(error)
print("end")
"""


@pytest.mark.exhaustive
def test_functions_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines.count("hello from 0") == 2 and "raised" in lines and lines[-1] == "end"
    assert "cannot be sent to the workers: cannot pickle '_thread.lock' object" in lines[-2]
