"""Test that what bounds a step is named, on real runs with something planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Launch, run
from tests.e2e.test_runs import zlaunch

TRAIN = """
    import json, os, sys, time, torch, zlaunch
    from torch import nn

    planted, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])

    def wait(where):
        ranks, seconds = planted.get(where, ([], 0.0))
        if rank in ranks:
            time.sleep(seconds)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            wait("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            wait("backward")
            return gradient

    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(Slow.apply(x.requires_grad_()))

    def slowly(function):
        def call(*arguments):
            wait("disk")
            return function(*arguments)
        return call

    os.preadv, os.pwritev = slowly(os.preadv), slowly(os.pwritev)
    torch.manual_seed(0)
    width = planted.get("width", 32)
    model = Net(*[nn.Linear(width, width) for _ in range(4)])
    engine, *_ = zlaunch.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 3,
        "zero_optimization": {"stage": 3, **planted.get("zero", {})},
    })
    for step in range(12):
        wait("script")
        engine.backward(engine(torch.randn(2, width)).square().mean())
        engine.step()
"""
ON_DISK: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": "disk"}}


def trained(folder: Path, ranks: int, **planted: Any) -> Launch:
    """Train twelve steps with what is planted: ranks and seconds by place."""
    launch = run(
        folder,
        f"--num_gpus={ranks}",
        "--no_local_rank",
        script=TRAIN,
        args=(json.dumps(planted),),
    )
    assert launch.process.returncode == 0, launch.err
    return launch


ALL, ONE = [0, 1], [1]


@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        ({"script": (ALL, 0.3)}, "the script bounds the step"),
        ({"forward": (ALL, 0.3)}, "computation bounds the step"),
        pytest.param({"backward": (ALL, 0.3)}, "computation bounds the step", marks=pytest.mark.exhaustive),
        ({"disk": (ALL, 0.05), "zero": ON_DISK}, "the disk bounds the step"),
        ({"script": (ONE, 0.3)}, "rank 1 on localhost bounds the step: the others wait {} for its script"),
        ({"forward": (ONE, 0.3)}, "rank 1 on localhost bounds the step: the others wait {} for its forward"),
        (
            {"backward": (ONE, 0.3)},
            "rank 1 on localhost bounds the step: the others wait {} for its backward",
        ),
        (
            {"disk": (ONE, 0.05), "zero": ON_DISK},
            "rank 1 on localhost bounds the step: the others wait {} for its disk",
        ),
    ],
    ids=[
        "input",
        "forward",
        "backward",
        "disk",
        "one's input",
        "one's forward",
        "one's backward",
        "one's disk",
    ],
)
def test_what_is_planted_is_named(planted: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    launch = trained(tmp_path, 2, **planted)
    begin, _, end = sentence.partition("{}")
    (said,) = [line for line in launch.err.splitlines() if "bounds the step" in line]
    assert said.startswith(f"zlaunch: {begin}") and end in said, said
    report = zlaunch(tmp_path, "report", "run")
    assert report.returncode == 0 and report.stdout.splitlines()[0] == said.removeprefix("zlaunch: ")


def test_a_quiet_run_says_nothing(tmp_path: Path) -> None:
    launch = run(tmp_path, "-q", "--no_local_rank", script=TRAIN, args=("{}",))
    assert (launch.process.returncode, launch.err) == (0, "")
