"""Test runs that lose workers and nodes, and go on from the memory of those that are left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cluster.helpers import pid_of, start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch
from tests.limits import wait_until

TRAIN = """
    import os, sys, time, torch, zlaunch

    last, wait_s, attempt = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    config = {
        "train_batch_size": 12,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"in_memory": {"every": 5}},
    }
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    engine, *_ = zlaunch.initialize(model=model, config=config)
    engine.client_state = dict
    engine.load_checkpoint(zlaunch.resume_dir())
    print("begins at", engine.global_steps, engine.world_size, flush=True)
    if os.environ["ZLAUNCH_RESTART_COUNT"] == attempt:
        last = engine.global_steps + 20
    while engine.global_steps < last:
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(engine.global_steps))
        x = batch.chunk(engine.world_size)[engine.global_rank]
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(loss.detach_())
        print("step", engine.global_steps, loss.item() / engine.world_size, flush=True)
        time.sleep(wait_s)
"""


def losses(launch: Launch) -> dict[int, float]:
    """The mean loss of every step, of the last time that it was made."""
    try:
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) (\S+)\n", launch.log(0))}
    except OSError:
        return {}


def begins(launch: Launch) -> list[tuple[int, int]]:
    """The step and the number of ranks with which each attempt begins."""
    return [(int(a), int(b)) for a, b in re.findall(r"begins at (\d+) (\d+)\n", launch.log(0))]


def train(
    cluster: Testbed,
    folder: Path,
    *options: str,
    last: int = 30,
    wait_s: float = 0.1,
    last_attempt: str = "",
) -> Launch:
    """Start a run of `last` steps, or one that ends 20 steps after an attempt has begun."""
    folder.mkdir()
    given = ("--num_gpus=1", "--heartbeat=5", "--connect_timeout=10", *options)
    return start(cluster, folder, *given, script=TRAIN, args=(str(last), str(wait_s), last_attempt))


def straight(cluster: Testbed, folder: Path, *options: str, last: int = 30) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    launch = train(cluster, folder, *options, last=last, wait_s=0.0)
    assert launch.wait() == 0, launch.err
    return losses(launch)


def test_a_killed_worker(cluster: Testbed, tmp_path: Path) -> None:
    launch = train(cluster, tmp_path / "killed", "--max_restarts=1")
    wait_until(lambda: 18 in losses(launch), "step 18")
    host, pid = pid_of(launch, 1)
    cluster.enter(host, "kill", "-KILL", str(pid))
    assert launch.wait() == 0, launch.err
    first, second = begins(launch)
    assert first == (0, 3) and second[0] >= 10
    assert losses(launch) == straight(cluster, tmp_path / "straight")
    for node in cluster.hosts:
        assert "zlaunch-memory" not in cluster.enter(node, "ls", "/dev/shm").stdout


@pytest.mark.parametrize("lost", ["n1", pytest.param("n2", marks=pytest.mark.exhaustive)])
def test_a_spare_takes_the_place_of_a_node_that_is_cut_off(
    cluster: Testbed, tmp_path: Path, lost: str
) -> None:
    launch = train(cluster, tmp_path / "cut", "--spares=1")
    wait_until(lambda: 18 in losses(launch), "step 18")
    cluster.cut(lost)
    try:
        assert launch.wait() == 0, launch.err
    finally:
        cluster.heal(lost)
    assert f"n3 takes the place of {lost}" in launch.err
    first, second = begins(launch)
    assert first == (0, 2) and second[1] == 2 and second[0] >= 10
    assert losses(launch) == straight(cluster, tmp_path / "straight", "--num_nodes=2")


def _plain(last: int) -> dict[int, float]:
    """The losses of plain torch on whole batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    found = {}
    for step in range(last):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # zlaunch's default
        optimizer.step()
        found[step + 1] = loss.item()
    return found


@pytest.mark.exhaustive
def test_a_node_goes_and_comes_back(cluster: Testbed, tmp_path: Path) -> None:
    launch = train(cluster, tmp_path / "rebooted", "--min_nodes=2", last=1 << 30, last_attempt="2")
    wait_until(lambda: 18 in losses(launch), "step 18")
    cluster.reboot("n2")
    assert launch.wait() == 0, launch.err
    assert "going on with 2 of 3 nodes, without n2" in launch.err
    assert "going on with 3 of 3 nodes" in launch.err
    assert [world for _, world in begins(launch)] == [3, 2, 3]
    assert all(step >= 10 for step, _ in begins(launch)[1:])
    found = losses(launch)
    assert found == pytest.approx(_plain(max(found)), rel=1e-3, abs=1e-4)
