"""Measure what zlaunch's checks cost in a step of a model with many layers.

    python -m benchmarks.checks [--layers 100] [--width 256] [--out FILE.json]

One process trains a byte-level GPT at several stages, then times the checks of one step on their own:
identity and address of every module and parameter, parameters that were unfrozen, and values that were
written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zlaunch
from examples.gpt import GPT, Size


def median_seconds(action: Callable[[], object], rounds: int) -> float:
    """The median time of one call."""
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure(stage: int, size: Size, rounds: int, *, bf16: bool) -> dict[str, float]:
    """Seconds of a step and of its checks, and their share in percent."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": bf16},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = zlaunch.initialize(model=GPT(size), config=config)
    tokens = torch.randint(0, 256, (1, size.context + 1), device=engine.device)

    def step() -> None:
        logits = engine(tokens[:, :-1]).float()
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()

    def checks() -> None:
        engine.handles.take_unfrozen()
        engine.handles.check()
        engine.handles.sync_to_masters()

    step()
    whole, part = median_seconds(step, rounds), median_seconds(checks, 20 * rounds)
    engine.destroy()
    return {"step_s": whole, "checks_s": part, "percent": 100 * part / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    zlaunch.init_distributed()
    size = Size(layers=args.layers, width=args.width, heads=4, context=args.context)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "layers": args.layers,
        "width": args.width,
        "tokens": args.context,
    }
    for stage in (0, 3):
        for bf16 in (False, True):
            found = measure(stage, size, args.rounds, bf16=bf16)
            name = f"stage {stage} {'bf16' if bf16 else 'fp32'}"
            result[name] = found
            print(
                f"{name}: a step {found['step_s']:.3f} s, its checks {1e3 * found['checks_s']:.3f} ms, "
                f"{found['percent']:.3f} %",
                flush=True,
            )
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
