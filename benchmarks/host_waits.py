"""Count the host's waits for the device in a step with the profiler; try collectives of one rank.

    python -m benchmarks.host_waits [--model 100m] [--stage 2] [--offload] [--steps 5]
    python -m benchmarks.host_waits --collectives

On a CPU, which has no such waits, it only shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

import torch

import zlaunch
from benchmarks.systems import MODELS
from examples.gpt import GPT, loss_of

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the CUDA runtime that keep the host; cudaMemcpyAsync is none of them."""


def count_waits(model: str, stage: int, steps: int, *, offload: bool) -> dict[str, Any]:
    """Waits of the host in each of the steps, by the call's name."""
    device = zlaunch.init_distributed()
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    size = MODELS[model]
    engine, *_ = zlaunch.initialize(model=GPT(size).to(device), config=config)
    data = [torch.randint(0, 256, (4, size.context + 1), device=device) for _ in range(steps + 3)]

    def step(batch: torch.Tensor) -> None:
        engine.backward(loss_of(engine, batch))
        engine.step()

    for batch in data[:3]:
        step(batch)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        torch.cuda.synchronize()
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for batch in data[3:]:
            step(batch)
    found = Counter(event.name for event in profile.events() or () if event.name in _WAITS)
    found["cudaDeviceSynchronize"] -= min(1, found["cudaDeviceSynchronize"])  # the profiler's own at its end
    engine.destroy()
    return {
        "stage": stage,
        "offload": offload,
        "waits_of_a_step": {name: round(count / steps, 2) for name, count in found.items() if count},
    }


def collectives(numel: int = 1 << 24) -> dict[str, Any]:
    """One reduce-scatter and one all-gather of one rank: that the calls work, not how fast they are."""
    import torch.distributed as dist

    device = zlaunch.init_distributed()
    full = torch.ones(numel, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    part = torch.empty_like(full)
    started = time.perf_counter()
    dist.reduce_scatter_tensor(part, full)
    dist.all_gather_into_tensor(full, part)
    dist.all_reduce(full)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    right = bool((full == 1).all())
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {"backend": backend, "right": right, "first_calls_s": round(time.perf_counter() - started, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="100m")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--collectives", action="store_true")
    args = parser.parse_args()
    if args.collectives:
        print(json.dumps(collectives()))
    else:
        print(json.dumps(count_waits(args.model, args.stage, args.steps, offload=args.offload)))


if __name__ == "__main__":
    main()
