"""Test that what bounds a step is named for a run on several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import ROOT

TRAIN = """
    import os, socket, sys, time, torch, zlaunch
    from torch import nn

    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    engine, *_ = zlaunch.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    })
    for step in range(12):
        if len(sys.argv) > 1 and int(os.environ["RANK"]) // 2 == 1:
            time.sleep(0.3)
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
"""


def said(cluster: Testbed, folder: Path, *args: str) -> str:
    launch = start(cluster, folder, script=TRAIN, args=args, env={"PYTHONPATH": str(ROOT)})
    assert launch.wait() == 0, launch.err
    (line,) = [line for line in launch.err.splitlines() if "bounds the step" in line]
    return line


@pytest.mark.exhaustive
def test_a_slow_link(cluster: Testbed, tmp_path: Path) -> None:
    with cluster.latency("n2", 25):
        assert "communication between 3 nodes bounds the step" in said(cluster, tmp_path)


@pytest.mark.exhaustive
def test_a_slow_node(cluster: Testbed, tmp_path: Path) -> None:
    line = said(cluster, tmp_path, "slow")
    assert " on n2 bounds the step: the others wait " in line, line
    assert line.endswith("for its script (data, evaluation, saving)"), line
