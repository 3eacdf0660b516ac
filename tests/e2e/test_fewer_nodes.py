"""Test the global batch of runs that go on without some of their nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch
from tests.ports import reserved_port

SCRIPT = """
import os, sys, torch, zlaunch
net = torch.nn.Linear(2, 1)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = zlaunch.initialize(model=net, config=(sys.argv[1:] or [config])[0])
attempt = os.environ["ZLAUNCH_RESTART_COUNT"]
for _ in range(4):
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    if not sys.argv[1:] and attempt == "0" and engine.global_rank == 1:
        open("full", "w")
        sys.exit(1)
print("BATCH", engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.global_steps)
"""
FULL_DISK = """
import os, shutil
usage = shutil.disk_usage
def disk_usage(path):
    is_full = os.path.exists(os.path.join(path, "full"))
    is_second = "agent_127.0.0.1" in os.readlink("/proc/self/fd/2")
    return type("Usage", (), {"free": 0}) if is_full and is_second else usage(path)
shutil.disk_usage = disk_usage
"""
"""Fills the disk of one of the two nodes, after the file `full` was written."""
SGD = {"type": "SGD", "params": {"lr": 0.1}}
DEAD = "127.0.0.9"
OPTIONS = ("--hostfile=hosts", "--min_nodes=1", "--no_local_rank")


@pytest.mark.exhaustive
def test_a_restart_without_a_node_keeps_its_global_batch(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    options = (*OPTIONS, "--max_restarts=1", "--exclude_unhealthy")
    launch = Launch(tmp_path, *options, script=SCRIPT, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert launch.wait() == 0, launch.err
    assert "going on with 1 of 2 nodes, without 127.0.0.1" in launch.err
    assert "BATCH 4 2 2" in launch.out


@pytest.mark.exhaustive
def test_a_start_without_a_node_has_the_global_batch_of_all(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost slots=1\n{DEAD} slots=1\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": SGD}))
    with reserved_port() as port:
        launch = Launch(tmp_path, *OPTIONS, f"--ssh_port={port}", script=SCRIPT, args=("ds.json",))
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
