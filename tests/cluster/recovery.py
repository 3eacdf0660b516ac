"""Train on the testbed, so that what happens to workers and nodes shows in the losses of the steps."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.cluster.helpers import start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch

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
        print("step", engine.global_steps, loss.item() / engine.world_size, time.time(), flush=True)
        time.sleep(wait_s)
"""


def losses(launch: Launch) -> dict[int, float]:
    """The mean loss of every step, of the last time that it was made."""
    try:
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) (\S+) \S+\n", launch.log(0))}
    except OSError:
        return {}


def begins(launch: Launch) -> list[tuple[int, int]]:
    """The step and the number of ranks with which each attempt begins."""
    try:
        return [(int(a), int(b)) for a, b in re.findall(r"begins at (\d+) (\d+)\n", launch.log(0))]
    except OSError:
        return []


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


def moments(launch: Launch) -> list[tuple[int, float]]:
    """The steps that rank 0 has finished, each with the time."""
    try:
        return [(int(a), float(b)) for a, b in re.findall(r"step (\d+) \S+ (\S+)\n", launch.log(0))]
    except OSError:
        return []


def plain(last: int) -> dict[int, float]:
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
