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
    class SlowSGD(torch.optim.SGD):
        def step(self, closure=None):
            wait("step")
            return super().step(closure)

    torch.manual_seed(0)
    width = planted.get("width", 32)
    model = Net(*[nn.Linear(width, width) for _ in range(4)])
    own = SlowSGD(model.parameters(), lr=1e-3) if "step" in planted else None
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine, *_ = zlaunch.initialize(model=model, optimizer=own, config={
        "train_micro_batch_size_per_gpu": 2,
        **({} if own else {"optimizer": adam}),
        "zero_allow_untested_optimizer": True,
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


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        ({"script": (ALL, 0.3)}, "the script bounds the step"),
        ({"forward": (ALL, 0.3)}, "computation bounds the step"),
        pytest.param({"backward": (ALL, 0.3)}, "computation bounds the step", marks=pytest.mark.exhaustive),
        ({"disk": (ALL, 0.05), "zero": ON_DISK}, "the disk bounds the step"),
        ({"step": (ALL, 0.3)}, "the optimizer's step bounds the step"),
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
        "optimizer",
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


TOKENS = """
    import torch, zlaunch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(500, 64), nn.Linear(64, 500)
            self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])

        def forward(self, input_ids):
            hidden = self.layers(self.embedding(input_ids))
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())

    engine, *_ = zlaunch.initialize(model=Model(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    })
    for _ in range(12 * 64):
        engine.backward(engine(torch.randint(500, (1, 4))))
        engine.step()
"""


@pytest.mark.exhaustive
def test_a_small_batch_is_named(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus=1", "--no_local_rank", script=TOKENS)
    assert launch.process.returncode == 0, launch.err
    (said,) = [line for line in launch.err.splitlines() if "bounds the step" in line]
    assert said.startswith("zlaunch: a small batch bounds the step: forward and backward passes of 4 tokens")
    (environment,) = launch.events("environment")
    assert set(environment["limits"]) == {"matmul_tflops"}
    last = launch.events("metrics")[-1]["values"]
    assert last["mfu"] == pytest.approx(last["tflops"] / environment["limits"]["matmul_tflops"])
    numel = 8 * (64 * 64 + 64) + 64 * 500 + 500  # not the table
    assert last["tflops"] == pytest.approx(6 * numel * last["tokens_per_s"] / 1e12)


@pytest.mark.exhaustive
def test_the_bytes_of_a_link(tmp_path: Path) -> None:
    """Over gloo each rank moves, at stage 2, the gradients and the parameters of 4 layers of 32 x 33."""
    env = {"ZLAUNCH_SHARED_MEMORY": "0"}
    args = (json.dumps({"zero": {"stage": 2}}),)
    launch = run(tmp_path, "--num_gpus=2", "--no_local_rank", script=TRAIN, args=args, env=env)
    assert launch.process.returncode == 0, launch.err
    assert set(launch.events("environment")[0]["limits"]) == {"matmul_tflops", "link_gbs"}
    moved = [event["values"]["moved_mb"] for event in launch.events("metrics")[2:]]
    few = 1e-3  # a number of a step that all ranks agree on may be among them
    assert moved == pytest.approx([2 * 4 * 32 * 33 * 4 / 2 / 1e6] * len(moved), rel=few) and moved


@pytest.mark.exhaustive
def test_a_quiet_run_says_nothing(tmp_path: Path) -> None:
    launch = run(tmp_path, "-q", "--no_local_rank", script=TRAIN, args=("{}",))
    assert (launch.process.returncode, launch.err) == (0, "")
