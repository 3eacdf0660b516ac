"""Measure the optimizer step on the CPU beside torch, DeepSpeed and memory bandwidth.

    python -m benchmarks.shard_step [--millions 64] [--rounds 9] [--out FILE.json]

AdamW with fp32 state takes a bf16 gradient and returns bf16 parameters: 28 bytes per parameter must move.
torch's fused AdamW and DeepSpeed's CPUAdam take fp32 gradients and return fp32 parameters, so the benchmark
adds two casts in preallocated buffers. All take turns in one process. Ratios are medians over the rounds of
the ratios within a round. DeepSpeed takes part if it can be imported (DS_ACCELERATOR=cpu).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zlaunch.cuda_ops import host, loader
from zlaunch.cuda_ops.arguments import AdamArgs
from zlaunch.cuda_ops.step import adam_step

ADAMW: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
STEP_BYTES, TRIAD_BYTES = 28, 12
OURS, CHUNKS, TORCH, DEEPSPEED = "numba", "torch in chunks", "torch", "deepspeed"


class Shard:
    """The flat tensors of one shard, the same at the start for every system."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master = torch.randn(numel)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.grad = torch.randn(numel).bfloat16()
        self.out = torch.empty(numel, dtype=torch.bfloat16)
        self.steps = 0


def ours(shard: Shard) -> None:
    shard.steps += 1
    state = shard.master, shard.exp_avg, shard.exp_avg_sq
    args = AdamArgs(multiplier=1.0, found_inf=0.0, decoupled=True, **ADAMW)
    adam_step(*state, shard.grad, shard.out, shard.steps, args)


def torch_in_chunks(shard: Shard) -> None:
    """Ours where numba is missing."""
    with_numba = host.kernel
    host.kernel = lambda name: None  # type: ignore[assignment]
    try:
        ours(shard)
    finally:
        host.kernel = with_numba


def torch_whole(shard: Shard, wide: torch.Tensor) -> None:
    shard.steps += 1
    wide.copy_(shard.grad)
    torch._fused_adamw_(
        [shard.master],
        [wide],
        [shard.exp_avg],
        [shard.exp_avg_sq],
        [],
        [torch.tensor(float(shard.steps))],
        amsgrad=False,
        maximize=False,
        **ADAMW,
    )
    shard.out.copy_(shard.master)


def deepspeed(shard: Shard, wide: torch.Tensor) -> Callable[[], None]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(shard.master)
    parameter.grad = wide
    betas = (ADAMW["beta1"], ADAMW["beta2"])
    options = {name: ADAMW[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = DeepSpeedCPUAdam([parameter], betas=betas, **options)

    def step() -> None:
        wide.copy_(shard.grad)
        optimizer.step()
        shard.out.copy_(shard.master)

    return step


def triads(numel: int) -> dict[str, Callable[[], Any]]:
    """a = b + s * c by torch and, where it is installed, by numba on the step's own threads."""
    a, b, c = (torch.ones(numel) for _ in range(3))
    made: dict[str, Callable[[], Any]] = {"triad, torch": lambda: torch.add(b, c, alpha=2.5, out=a)}
    if importlib.util.find_spec("numba"):
        import numba

        @numba.njit(nogil=True)
        def chunk(x: Any, y: Any, z: Any) -> None:
            for i in range(x.size):
                x[i] = y[i] + numba.float32(2.5) * z[i]

        arrays = [tensor.numpy() for tensor in (a, b, c)]
        made["triad, numba"] = lambda: host.in_chunks(
            lambda start, stop: chunk(*(array[start:stop] for array in arrays)), numel, numel
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=64, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="write everything measured to this JSON file")
    args = parser.parse_args()

    numel = args.millions << 20
    shard, wide = Shard(numel), torch.zeros(numel)
    systems: dict[str, Callable[[], Any]] = {}
    if host.kernel("adam"):
        systems[OURS] = lambda: ours(shard)
    else:
        print("numba not installed: skipped")
    systems |= {CHUNKS: lambda: torch_in_chunks(shard), TORCH: lambda: torch_whole(shard, wide)}
    if importlib.util.find_spec("deepspeed"):
        systems[DEEPSPEED] = deepspeed(shard, wide)
    else:
        print("DeepSpeed not installed: skipped")
    systems |= triads(numel)
    assert loader.mode() == "auto"
    seconds = measure(systems, args.rounds)
    report(seconds, numel, args)


def measure(systems: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(-1, rounds):
        for name in systems if turn % 2 else reversed(systems):
            started = time.perf_counter()
            systems[name]()
            if turn >= 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(seconds: dict[str, list[float]], numel: int, args: argparse.Namespace) -> None:
    print(f"{args.millions} Mi parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':16} {'ms':>8} {'min':>8} {'GB/s':>6}")
    best = min(
        (name for name in seconds if "triad" in name), key=lambda name: statistics.median(seconds[name])
    )
    bandwidth: dict[str, float] = {}
    for name, times in seconds.items():
        middle = statistics.median(times)
        bandwidth[name] = numel * (TRIAD_BYTES if "triad" in name else STEP_BYTES) / middle / 1e9
        print(f"{name:16} {middle * 1e3:8.1f} {min(times) * 1e3:8.1f} {bandwidth[name]:6.1f}")
    ratios: dict[str, dict[str, float]] = {}
    for name in (OURS, CHUNKS):
        if name not in seconds:
            continue
        others = [other for other in (CHUNKS, TORCH, DEEPSPEED) if other in seconds and other != name]
        pairs = {other: zip(seconds[other], seconds[name], strict=True) for other in others}
        ratios[name] = {
            f"over {other}": statistics.median(b / a for b, a in pairs[other]) for other in others
        }
        triad = zip(seconds[best], seconds[name], strict=True)
        share = STEP_BYTES / TRIAD_BYTES
        ratios[name][f"bandwidth of {best}"] = statistics.median(b / a * share for b, a in triad)
        print(f"{name}: " + ", ".join(f"{ratio:.2f} x {what}" for what, ratio in ratios[name].items()))
    if args.out:
        machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "machine": platform.machine()}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        result = {"args": vars(args), **machine, **versions, "gb_per_s": bandwidth, "ratios": ratios}
        Path(args.out).write_text(json.dumps({**result, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
