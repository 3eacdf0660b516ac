"""Time what a step costs the host: its Python, and torch's calls on tensors of a few elements.

    python -m benchmarks.host_time [--layers 32] [--ranks 8] [--rounds 9] [--steps 20] [--profile stage 3]

One process trains a model of small layers as one rank of several. Its collectives end at once (torch's "fake"
process group). The CPU time of the main thread is measured: a GPU that computes faster waits for it. "torch"
is the same model and optimizer without sharding, and the own part of a system is its time beyond that.
Systems take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 32
"""Makes a layer just larger than what stage 3 leaves whole (``ShardingOptions.minimum_numel``)."""
LR = 1e-7
"""Keeps outputs far from 0, which this loss leads to: gradients near to fp32's least values take longer."""
_REDUCTIONS = tuple(
    name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)
)
"""Names torch's call; 2.13 renamed it."""


class Layer(nn.Module):
    """Has nine parameters, as a layer of Llama.

    All elements are equal, because a gather returns this rank's part in place of every other's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1 / WIDTH)) for _ in range(2))
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.full((WIDTH, WIDTH), 1 / WIDTH)) for _ in range(7)
        )

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.vectors:
            x = x + vector
        for matrix in self.matrices:
            x = x @ matrix
        return x


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def _torch_step(model: nn.Module) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(x: Tensor) -> None:
        loss_of(model, x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _fsdp2(layers: int) -> Callable[[Tensor], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = build(layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _torch_step(model)


def _zlaunch(layers: int, stage: int) -> Callable[[Tensor], None]:
    import zlaunch

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        # By default so small layers would stay whole.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = zlaunch.initialize(model=build(layers), config=config)

    def step(x: Tensor) -> None:
        engine.backward(loss_of(engine, x))
        engine.step()

    return step


def join(ranks: int) -> None:
    """Join as rank 0 of ranks that are not there, as if they sent what this one sends."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ["ZLAUNCH_SHARED_MEMORY"] = "0"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    real: Any = {name: getattr(dist, name) for name in (*_REDUCTIONS, "all_reduce", "all_to_all_single")}

    # The fake group writes what it gathers, and leaves the results of these as they are.
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **options: Any) -> Any:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(ranks)
        return real["all_reduce"](tensor, op, *args, **options)

    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
        output.copy_(input)
        return real["all_to_all_single"](output, input, *args, **options)

    def reduce_scatter(name: str) -> Callable[..., Any]:
        def run(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
            output.copy_(input[: len(output)])
            return real[name](output, input, *args, **options)

        return run

    dist.all_reduce = all_reduce
    dist.all_to_all_single = all_to_all_single
    for name in _REDUCTIONS:
        setattr(dist, name, reduce_scatter(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="print where the time of this system goes, and measure nothing")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    join(args.ranks)
    systems: dict[str, Callable[[], Callable[[Tensor], None]]] = {
        "torch": lambda: _torch_step(build(args.layers)),
        "stage 0": lambda: _zlaunch(args.layers, 0),
        "stage 1": lambda: _zlaunch(args.layers, 1),
        "stage 2": lambda: _zlaunch(args.layers, 2),
        "stage 3": lambda: _zlaunch(args.layers, 3),
        "fsdp2": lambda: _fsdp2(args.layers),
    }
    x = torch.randn(2, WIDTH)
    if args.profile:
        step = systems[args.profile]()
        for _ in range(5):
            step(x)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(args.steps):
            step(x)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return 0
    steps = {name: make() for name, make in systems.items()}
    for step in steps.values():
        for _ in range(5):
            step(x)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            begin = time.thread_time()
            for _ in range(args.steps):
                step(x)
            taken[name].append((time.thread_time() - begin) / args.steps * 1e3)
    median = {name: statistics.median(each) for name, each in taken.items()}
    shown = {
        "ms": {name: round(ms, 2) for name, ms in median.items()},
        "least ms": {name: round(min(each), 2) for name, each in taken.items()},
        "own part, of torch's step": {
            name: round(ms / median["torch"] - 1, 2) for name, ms in median.items() if name != "torch"
        },
    }
    print(json.dumps(shown, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
