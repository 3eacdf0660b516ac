"""Test that a run that hangs is told from its ranks' places: by --hang_timeout, and by `zlaunch stacks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT, Launch, run
from tests.limits import LIMIT_S, wait_until

TRAIN = """
    import sys, threading, time

    begun = threading.Event()

    def show_life():  # however slow the machine is to start
        while not begun.wait(1):
            print("starting", flush=True)

    threading.Thread(target=show_life, daemon=True).start()
    import torch, zlaunch
    from torch import nn

    kind, stage = sys.argv[1], int(sys.argv[2])
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    engine, *_ = zlaunch.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    })

    late = engine.global_rank == 1

    def load(step):
        if step == 5 and late and kind == "sleeps":
            time.sleep(1e5)
        while step == 5 and late and kind == "spins":
            pass
        return torch.randn(4, 32)

    for step in range(1_000_000):
        engine.backward(engine(load(step)).square().mean())
        engine.step()
        if step < 5:
            print(f"step {step}", flush=True)
        if step == 4:
            begun.set()
"""
OUTSIDE = "with no collective in its stack"
SLEEPS = "worker.py:26 in load"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "stage"), [("sleeps", 3), pytest.param("spins", 1, marks=pytest.mark.exhaustive)]
)
def test_the_rank_that_hangs_is_named(tmp_path: Path, kind: str, stage: int) -> None:
    ended = run(
        tmp_path,
        *("--num_gpus=3", "--no_local_rank", "--hang_timeout=20"),
        script=TRAIN,
        args=(kind, str(stage)),
    )
    assert ended.process.returncode == 1
    lines = [line.strip() for line in ended.err.splitlines()]
    where = lines.index("zlaunch: error: hang: no rank has written anything for 20 s")
    assert lines[where + 1].startswith("rank 1 on localhost is at worker.py:")
    assert lines[where + 1].endswith(
        " in load, with no collective in its stack: the others probably wait for it"
    )
    assert lines[where + 2].startswith("ranks 0, 2 wait in a collective that ")


def stand(launch: Launch) -> dict[int, dict[str, Any]]:
    """Return what the ranks that stand still have said last."""
    last = {event["rank"]: event for event in launch.events("standing")}
    return {rank: event for rank, event in last.items() if event["begun"]}


@pytest.mark.exhaustive
def test_stacks_says_where_the_ranks_are(tmp_path: Path) -> None:
    launch = Launch(
        tmp_path,
        *("--num_gpus=2", "--no_local_rank"),
        script=TRAIN,
        args=("sleeps", "0"),
        env={"ZLAUNCH_SHARED_MEMORY": "0"},
    )
    try:
        wait_until(lambda: len(stand(launch)) == 2, "both ranks stand still")
        told = stand(launch)[0]
        # over gloo torch's flight recorder has the collective too
        name, number, text = told["unfinished"][0]
        assert (
            text.startswith(f"gloo:all_reduce (number {number} in its group, shape [")
            and told["begun"][name] >= number
        )
        command = [sys.executable, "-m", "zlaunch", "stacks", str(launch.run_dir)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        lines = said.stdout.splitlines()
        late = f"rank 1 on localhost is at {SLEEPS}, {OUTSIDE}, and has not begun {text}"
        assert lines[0] == f"{late}, in which others wait"
        assert lines[1].startswith("rank 0 on localhost waits in a collective that ")
        assert lines[3].startswith("== rank 0 on localhost, process ")
    finally:
        launch.process.terminate()
        launch.wait()


DDP = """
    import time, torch, torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for step in range(6):
        if step == 5 and dist.get_rank() == 1:
            time.sleep(1e5)
        model(torch.randn(4, 8)).sum().backward()
        print(step, flush=True)
"""


@pytest.mark.exhaustive
def test_a_script_of_plain_torch(tmp_path: Path) -> None:
    ended = run(tmp_path, "--num_gpus=3", "--no_local_rank", "--hang_timeout=20", script=DDP)
    where = "rank 1 on localhost is at worker.py:9 in <module>, with no collective in its stack: the others"
    assert (
        f"{where} probably wait for it" in ended.err
        and "ranks 0, 2 are in backward (worker.py:10 in <module>)" in ended.err
    )
