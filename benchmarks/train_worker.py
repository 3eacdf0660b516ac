"""Run one rank of ``benchmarks.train``: steps of several systems in turn, timed between barriers."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.systems import MODELS, available
from zlaunch.runtime.comm.process_group import init_distributed


def peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--systems", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--micro_batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    device = init_distributed()
    size = MODELS[args.model]
    builders = available(args.micro_batch, peers=True)
    names = args.systems.split(",")
    base = peak_mb(device)
    steps = {name: builders[name](size, device) for name in names}
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (args.micro_batch, size.context + 1)

    def batch() -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator).to(device)

    losses = {name: [float(step(batch())) for _ in range(2)][-1] for name, step in steps.items()}  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(args.steps):
                steps[name](batch())
            steps[name].drain()
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            seconds[name].append((time.perf_counter() - started) / args.steps)
    peaks: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_mb(device) - base)
    if dist.get_rank() == 0:
        result = {"seconds": seconds, "peak_mb": peaks, "losses": losses}
        Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
