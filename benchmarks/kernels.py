"""Measure zlaunch's CUDA kernels beside a device copy and the operations of torch that they replace.

    python -m benchmarks.kernels [--millions 128] [--rounds 20]

Each result has the median time between CUDA events, the bandwidth for the bytes that must move, and its share
of the copy bandwidth. The operations take turns, so that a clock change affects all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zlaunch.cuda_ops import loader, signs
from zlaunch.cuda_ops.arguments import AdamArgs
from zlaunch.cuda_ops.narrow_state import BLOCK
from zlaunch.cuda_ops.narrow_step import narrow_step
from zlaunch.cuda_ops.narrow_twins import States
from zlaunch.cuda_ops.norm import prepare_step, sum_of_squares, sums_of_squares
from zlaunch.cuda_ops.quantize import dequantize, packed_bytes, quantize, quantize_with_error
from zlaunch.cuda_ops.step import adam_step

ADAMW: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
Case = tuple[float, Callable[[], Any]]
"""Bytes per element that have to move, and the call."""


def _random_bytes(count: int, device: str) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, device=device)


def cases(numel: int) -> dict[str, Case]:
    device = "cuda"
    # Random values: bits that change cost a GPU power, and zeros would be read at a higher clock.
    master = torch.randn(numel, device=device)
    exp_avg = torch.randn(numel, device=device)
    wide = torch.randn(numel, device=device)
    exp_avg_sq = torch.rand(numel, device=device)
    grad = torch.randn(numel, device=device).bfloat16()
    out = torch.randn(numel, device=device).bfloat16()
    step, lr, multiplier = (torch.full((), x, device=device) for x in (5.0, 1e-4, 0.5))
    found_inf = torch.zeros((), device=device)
    parts = list(grad.split(-(-numel // 52)))  # as many units as a model of 1.5 billion parameters has

    eight, four = (_random_bytes(packed_bytes(numel, bits=bits), device) for bits in (8, 4))
    error = torch.randn_like(grad)
    # A row for each rank of 64, of the same size as one row of them all.
    ranks = _random_bytes(packed_bytes(numel, bits=4), device).view(64, -1)
    bits = _random_bytes(signs.packed_bytes(numel), device)

    def ours() -> None:
        args = AdamArgs(lr=lr, multiplier=multiplier, found_inf=found_inf, decoupled=True, **ADAMW)
        adam_step(master, exp_avg, exp_avg_sq, grad, out, step, args)

    codes = [(_random_bytes(numel, device), torch.rand(-(-numel // BLOCK), 1, device=device)) for _ in "mv"]
    halves: list[tuple[Tensor, None]] = [(torch.rand_like(grad), None) for _ in "mv"]

    def narrow(states: States) -> None:
        args = AdamArgs(lr=lr, multiplier=multiplier, found_inf=found_inf, decoupled=True, **ADAMW)
        narrow_step(out, states, grad, None, step, args)

    return {
        "copy, fp32": (8, lambda: wide.copy_(master)),
        "adamw": (28, ours),
        "adamw, bf16 masters, 8-bit state": (10, lambda: narrow(codes)),
        "adamw, bf16 masters and state": (14, lambda: narrow(halves)),
        "adamw, torch with its casts": (
            28,
            lambda: torch_adamw(master, exp_avg, exp_avg_sq, grad, wide, out),
        ),
        "sum of squares": (2, lambda: sum_of_squares(grad)),
        "sums of squares of 52": (2, lambda: sums_of_squares(parts)),
        "norms of 52, torch": (2, lambda: torch._foreach_norm(parts)),
        "norm, torch": (2, lambda: torch._foreach_norm([grad])),
        "quantize, 8 bits": (3, lambda: quantize(grad, eight, bits=8)),
        "quantize, 4 bits, with error": (
            6.5,
            lambda: quantize_with_error(grad, error, four, bits=4, beta=0.8),
        ),
        "quantize, 4 bits, for 64 ranks": (2.5, lambda: quantize(grad, ranks, bits=4)),
        "dequantize, 4 bits, of 64 ranks": (2.5, lambda: dequantize(ranks, out, bits=4)),
        "dequantize, 8 bits": (3, lambda: dequantize(eight, out, bits=8)),
        "dequantize, 4 bits": (2.5, lambda: dequantize(four, out, bits=4)),
        "signs, with error": (8.125, lambda: signs.compress(wide, bits)),
        "signs back": (4.125, lambda: signs.expand(bits, wide)),
        "prepare": (0, lambda: prepare_step(torch.ones((), device=device), divisor=multiplier, clip=1.0)),
    }


def torch_adamw(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, wide: Tensor, out: Tensor
) -> None:
    """What a step takes without our kernel: three passes."""
    wide.copy_(grad)
    steps = [torch.full((), 5.0, device=master.device)]
    flags: dict[str, Any] = {"amsgrad": False, "maximize": False, "lr": 1e-4}
    torch._fused_adamw_([master], [wide], [exp_avg], [exp_avg_sq], [], steps, **ADAMW, **flags)
    out.copy_(master)


def measure(numel: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds, GB/s and the part of a copy's bandwidth, by case. Needs a CUDA device and CuPy."""
    loader.set_mode("cupy")
    calls = cases(numel)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-3, rounds):
        for name, (_, call) in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if turn >= 0:
                times[name].append(start.elapsed_time(stop))
    loader.set_mode("auto")
    middle = {name: statistics.median(values) for name, values in times.items()}
    speed = {name: calls[name][0] * numel / middle[name] / 1e6 for name in calls}
    return {
        name: {
            "ms": round(middle[name], 4),
            "gb_per_s": round(speed[name], 1),
            "of_copy": round(speed[name] / speed["copy, fp32"], 3),
        }
        for name in calls
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=128, help="millions of elements")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(json.dumps(measure(args.millions << 20, args.rounds), indent=1))


if __name__ == "__main__":
    main()
