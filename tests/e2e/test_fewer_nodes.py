"""Test the global batch of runs that go on without some of their nodes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.helpers import Launch
from tests.ports import reserved_port

SCRIPT = """
import torch, zlaunch
net = torch.nn.Linear(2, 1)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = zlaunch.initialize(model=net, config=config)
for _ in range(4):
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
print("BATCH", engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.global_steps)
"""
DEAD = "127.0.0.9"
OPTIONS = ("--hostfile=hosts", "--min_nodes=1", "--no_local_rank")


def test_a_run_without_a_node_keeps_its_global_batch(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost slots=1\n{DEAD} slots=1\n")
    with reserved_port() as port:
        launch = Launch(tmp_path, *OPTIONS, f"--ssh_port={port}", script=SCRIPT)
        assert launch.wait() == 0, launch.err
    assert f"going on with 1 of 2 nodes, without {DEAD}" in launch.err
    assert "BATCH 4 2 2" in launch.out


def test_a_config_that_fails_on_fewer_nodes_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost slots=2\n{DEAD} slots=1\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 9}))
    launch = Launch(tmp_path, *OPTIONS, script="import zlaunch", args=("--deepspeed_config", "ds.json"))
    assert launch.wait() == 2
    assert "a restart on 2 ranks, which --min_nodes or --spares allows, would fail" in launch.err
    assert not launch.run_dir.exists()
