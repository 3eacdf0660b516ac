"""Measure training speed and peak memory beside the peers.

    python -m benchmarks.train --peers [--model 15m] [--rounds 7] [--out FILE.json]

Speed: the same two processes build all systems, which take turns, so that a change of the machine's speed
affects all of them. Ratios are medians over the rounds of the ratios within a round. Memory: each system runs
in two fresh processes; the peak excludes the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(systems: list[str], args: argparse.Namespace, rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = {"systems": ",".join(systems), "model": args.model, "micro_batch": args.micro_batch}
        options |= {"rounds": rounds, "steps": steps, "out": out}
        command = [
            sys.executable,
            "-m",
            "zlaunch",
            "--quiet",
            "--num_gpus",
            str(args.num_gpus),
            "--no_local_rank",
        ]
        command += ["--run_dir", f"{folder}/run", "--module", "benchmarks.train_worker"]
        command += [f"--{name}={value}" for name, value in options.items()]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--model", default="15m")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--num_gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--systems", help="comma-separated; default: all")
    parser.add_argument("--no_memory", action="store_true")
    parser.add_argument("--out", help="write everything measured to this JSON file")
    args = parser.parse_args()

    import torch

    from benchmarks.systems import MODELS, available

    names = args.systems.split(",") if args.systems else list(available(args.micro_batch, args.peers))
    speed = run(names, args, args.rounds, args.steps)
    seconds: dict[str, list[float]] = speed["seconds"]
    tokens = args.micro_batch * MODELS[args.model].context * args.num_gpus
    memory = {} if args.no_memory else {name: run([name], args, 1, 3)["peak_mb"] for name in names}

    print(
        f"model {args.model}, {args.num_gpus} ranks, micro-batch {args.micro_batch}, "
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores; "
        f"medians of {args.rounds} rounds"
    )
    baselines = [
        name for name in ("ddp", "fsdp2", "deepspeed 1", "deepspeed 2", "deepspeed 3") if name in names
    ]
    print(
        f"{'':12} {'ms/step':>8} {'min':>7} {'tok/s':>7} {'peak MB':>8}  speed over " + "  ".join(baselines)
    )
    for name in names:
        ratios = [
            statistics.median(b / a for a, b in zip(seconds[name], seconds[base], strict=True))
            for base in baselines
        ]
        middle = statistics.median(seconds[name])
        peak = f"{max(memory[name]):8.0f}" if name in memory else f"{'-':>8}"
        print(
            f"{name:12} {middle * 1e3:8.1f} {min(seconds[name]) * 1e3:7.1f} {tokens / middle:7.0f} {peak}  "
            + "  ".join(
                f"{ratio:{max(len(base), 4)}.2f}" for ratio, base in zip(ratios, baselines, strict=True)
            )
        )
    if args.out:
        versions = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.processor(),
        }
        result = {"args": vars(args), "versions": versions, "memory_mb": memory, **speed}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
