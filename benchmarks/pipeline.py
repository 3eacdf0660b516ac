"""Measure pipeline parallelism beside torch's pipelining, and its bubble.

    python -m benchmarks.pipeline [--layers 8] [--width 256] [--micro_batches 8] [--rounds 9] [--out FILE]

The model is the example's GPT in float32. torch's pipeline is split manually at the same layers and uses the
same AdamW. The same processes build both, which take turns; the ratio is the median over the rounds. The
bubble is the share of a step in which a rank does not compute, measured on stages whose passes wait for a
fixed time. The host's work of some 30 ms a step counts as bubble. The formula is (p - 1) / (m + p - 1) for p
stages and m micro-batches (GPipe, arXiv 1811.06965, 2.3).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _model(args: argparse.Namespace) -> Any:
    import torch

    from examples.gpt import GPT, Size

    torch.manual_seed(0)
    return GPT(Size(layers=args.layers, width=args.width, heads=4, context=args.context))


def _loss(output: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def _ours(args: argparse.Namespace) -> Callable[[Any], float]:
    import torch.distributed as dist

    import zlaunch

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": [0.9, 0.95]}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "parallel": {"pipeline": dist.get_world_size()},
        "pipeline": {"schedule": args.schedule, "partition": "uniform"},
    }
    engine: Any = zlaunch.initialize(model=_model(args), config=config)[0]

    def step(batch: Any) -> float:
        parts = [(tokens[:, :-1], tokens[:, 1:]) for tokens in batch.chunk(args.micro_batches)]
        return float(engine.train_batch(iter(parts), _loss))

    return step


def _torch(args: argparse.Namespace) -> Callable[[Any], float]:
    """Cut the model by hand, and pipeline it by torch."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stages, stage = dist.get_world_size(), dist.get_rank()
    model = _model(args)
    first, stop = stage * args.layers // stages, (stage + 1) * args.layers // stages

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(model.blocks[first:stop])
            if stage == 0:
                self.tokens, self.positions = model.tokens, model.positions
            if stage == stages - 1:
                self.norm, self.head = model.norm, model.head

        def forward(self, x: Any) -> Any:
            if stage == 0:
                x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)) if stage == stages - 1 else x

    part = Part()
    optimizer = torch.optim.AdamW(part.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]
    kind: Any = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
    piped = kind(PipelineStage(part, stage, stages, torch.device("cpu")), args.micro_batches, loss_fn=_loss)

    def step(batch: Any) -> float:
        losses: list[Any] = []
        if stage == 0:
            piped.step(batch[:, :-1])
        elif stage == stages - 1:
            piped.step(target=batch[:, 1:], losses=losses)
        else:
            piped.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(mean, stages - 1)
        return float(mean)

    return step


def _wait(milliseconds: float, waited: list[float]) -> None:
    """Wait, and note for how long."""
    started = time.perf_counter()
    time.sleep(milliseconds / 1000)
    waited.append(time.perf_counter() - started)


def _bubble(args: argparse.Namespace) -> tuple[float, float]:
    """Measure the idle part of steps of stages that take a fixed time, and return it beside the formula.

    The stages' passes wait instead of computing, so that cores which they share do not matter: what is
    measured is the schedule and its transfers.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    import zlaunch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            _wait(args.pass_ms, busy)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            _wait(2 * args.pass_ms, busy)
            return gradient

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return Wait.apply(x * self.weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(stages))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    stages, count, busy = dist.get_world_size(), args.micro_batches, list[float]()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "parallel": {"pipeline": stages},
        "pipeline": {"schedule": args.schedule},
    }
    engine: Any = zlaunch.initialize(model=Model(), config=config)[0]

    def idle() -> float:
        busy.clear()
        data = iter([(torch.ones(1, 4), torch.ones(1, 4))] * count)
        dist.barrier()
        started = time.perf_counter()
        engine.train_batch(data, lambda output, labels: (output - labels).square().mean())
        return 1 - sum(busy) / (time.perf_counter() - started)

    idle()
    found = statistics.median(idle() for _ in range(args.rounds))
    engine.destroy()
    return found, (stages - 1) / (count + stages - 1)


def work(args: argparse.Namespace) -> None:
    """Time the systems in turn; rank 0 writes what it has measured."""
    import torch
    import torch.distributed as dist

    from zlaunch.runtime.comm.process_group import init_distributed

    init_distributed()
    bubble, formula = _bubble(args)
    systems = {"ours": _ours(args), "torch": _torch(args)}
    generator = torch.Generator().manual_seed(1)
    rows = args.micro_batch * args.micro_batches

    def batch() -> Any:
        return torch.randint(0, 256, (rows, args.context + 1), generator=generator)

    same = [batch() for _ in range(3)]
    losses = {name: [step(each) for each in same][-1] for name, step in systems.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(args.rounds):
        for name in systems if turn % 2 == 0 else reversed(systems):
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(args.steps):
                systems[name](batch())
            dist.barrier()
            seconds[name].append((time.perf_counter() - started) / args.steps)
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "losses": losses, "bubble": bubble, "formula": formula}
        Path(args.out).write_text(json.dumps(found))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    parser.add_argument("--pass_ms", type=float, default=120.0, help="time of a forward pass, for the bubble")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", help="write everything measured to this JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        sizes = ("layers", "width", "context", "micro_batch", "micro_batches", "schedule", "pass_ms")
        options = [f"--{name}={getattr(args, name)}" for name in (*sizes, "rounds", "steps")]
        command = [sys.executable, "-m", "zlaunch", "--quiet", "--no_local_rank"]
        command += ["--num_gpus", str(args.ranks), "--run_dir", f"{folder}/run"]
        command += ["--module", "benchmarks.pipeline", "--worker", f"--out={out}", *options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=env)
        found = json.loads(out.read_text())
    seconds = found["seconds"]
    for name, taken in seconds.items():
        print(f"{name:6} {statistics.median(taken):7.3f} s a step   loss {found['losses'][name]:.6f}")
    ratio = statistics.median(a / b for a, b in zip(seconds["torch"], seconds["ours"], strict=True))
    print(f"speed beside torch's pipelining: {ratio:.3f}")
    print(f"bubble: {found['bubble']:.3f} of a step; by the formula {found['formula']:.3f}")
    if args.out:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({"arguments": vars(args), "machine": machine, "ratio": ratio, **found}, indent=1)
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
