"""Run everything that needs a GPU: tests, peaks, kernels, training on one rank, offload, checkpoints.

    python -m benchmarks.gpu [--parts first|second|NAME,...] [--minutes 9] [--out FOLDER] [--rehearse]

Each part runs in its own process with its own time limit. `results.json` is rewritten after each part, so
that an interruption loses nothing; `log.txt` has the output. A failed part is recorded with the end of its
output. `--rehearse` runs small models on a CPU to check that every part works. No launcher is needed. The
exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.large import SIZES, flops_of_a_token
from zlaunch.system.processes import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
_STAGES = tuple(f"stage {stage}" for stage in range(4))
_SHOWN = 3000
"""Characters of what a failed part has said."""
_FALLBACK = re.compile(r"zlaunch uses torch operations instead of its CUDA kernels: (.*)")
"""Finds the warning of cuda_ops/loader.py."""
_SLOWER = 5
"""A rehearsal's limits are larger by this: a CPU is slower."""


@dataclass(frozen=True)
class Part:
    """One process. The last line that it prints is its result, as JSON, if it is no test."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    rehearsal: tuple[str, ...] | None = None
    """Extends the command in a rehearsal; None: it cannot be rehearsed on a CPU."""
    env: Mapping[str, str] | None = None


def _large(system: str, *more: str, micro_batch: int = 4) -> Part:
    options = ("benchmarks.large", "--system", system, "--steps", "8", "--micro_batch", str(micro_batch))
    return Part(
        system if not more else f"{system} {more[-1]}",
        (*options, *more),
        100,
        ("--model", "15m", "--micro_batch", "1"),
    )


FIRST = (
    Part("device", ("benchmarks.device",), 60, ("--size", "256")),
    Part("tests", ("pytest", "-n", "4", "-m", "gpu", "tests/gpu"), 240, ("-p", "tests.pretend_gpu.plugin")),
    *(_large(system, micro_batch=16) for system in ("torch", "stage 2", "stage 3", "stage 1", "stage 0")),
    Part("waits", ("benchmarks.host_waits", "--stage", "2"), 60, ("--model", "15m")),
    Part("waits at stage 3", ("benchmarks.host_waits", "--stage", "3"), 60, ("--model", "15m")),
    Part("kernels", ("benchmarks.kernels",), 60),
    Part("collectives", ("benchmarks.host_waits", "--collectives"), 60, ()),
)
SECOND = (
    Part(
        "ranks",
        (
            "pytest",
            "-n",
            "2",
            "--devices",
            "cuda",
            "-m",
            "multi_gpu and not exhaustive",
            "--no-rotation",
            "tests/runtime",
        ),
        240,
        ("-p", "tests.pretend_gpu.plugin", "-k", "test_fp32_is_as_exact_as_ddp"),
    ),
    _large("stage 2", "--autocast"),
    _large("stage 3", "--checkpoint", "--autocast"),
    # beside stages 2 and 3 of the first part
    *(_large(f"stage {stage} stepping", micro_batch=16) for stage in (2, 3)),
    Part("bounds", ("benchmarks.large", "--bounds"), 60, ("--model", "15m")),
    _large("narrow", "--model", "3000m", "--checkpoint", "--cap_gb", "24"),  # a full fine-tune of 3 billion
    _large("offload optimizer", "--cap_gb", "24"),
    _large("offload both", "--cap_gb", "24"),
    Part("waits of offload", ("benchmarks.host_waits", "--stage", "2", "--offload"), 60, ("--model", "15m")),
    Part(
        "saving", ("benchmarks.checkpoint", "--path", "FOLDER", "--rounds", "3"), 90, ("--numel", "1000000")
    ),
    Part(
        "beside peers",
        (
            "benchmarks.train_worker",
            "--systems=compute,ddp,stage 0,stage 1,stage 2,stage 3,fsdp2",
            "--model=100m",
            "--micro_batch=16",
            "--rounds=5",
            "--steps=10",
            "--out=/dev/stdout",
        ),
        100,
        ("--model=15m", "--micro_batch=1", "--rounds=1", "--steps=1", "--systems=compute,stage 0,stage 2"),
    ),
    Part(
        "largest", ("benchmarks.large", "--system", "offload both", "--model", "5000m", "--checkpoint"), 150
    ),
    Part("checks", ("benchmarks.checks", "--rounds", "3", "--out", "/dev/stdout"), 60, ("--layers", "4")),
    Part("largest under 24 GiB", ("benchmarks.largest", "--cap_gb", "24"), 100, ("--rehearse",)),
    Part("largest without offload", ("benchmarks.largest",), 120, ("--rehearse",)),
    Part("sanitizer", ("benchmarks.sanitizer", "--tools", "memcheck,racecheck"), 90, ("--plain",)),
    Part(
        "race detector of torch",
        ("benchmarks.large", "--system", "offload both", "--model", "15m", "--steps", "1"),
        90,
        env={"TORCH_CUDA_SANITIZER": "1"},
    ),
)
GROUPS = {"first": FIRST, "second": SECOND, "all": (*FIRST, *SECOND)}


def run(part: Part, limit_s: float, log: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run a part, and return its result, or how it failed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **(part.env or {})}
    env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # units are resized all the time
    words = [*part.command, *(part.rehearsal or () if rehearse else ())]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *(folder if word == "FOLDER" else word for word in words)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # or it would hold the GPU for nobody
        )
        try:
            text = process.communicate(timeout=limit_s)[0]
            code: int | str = process.returncode
        except subprocess.TimeoutExpired:
            _end(process)
            text, code = process.communicate()[0], f"more than {limit_s:.0f} s"
        finally:
            _end(process)
    with open(log, "a", encoding="utf-8") as said:
        said.write(f"\n== {part.name}: {' '.join(command)}\n{text}")
    # A fallback to torch's operations only makes a part slower: nothing else in its result shows it.
    fallback = _FALLBACK.search(text)
    kernels = f"torch's operations instead: {fallback[1]}" if fallback else "no fallback"
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "kernels": kernels}
    result = _last_json(text)
    if code == 0 and (result is not None or part.command[0] == "pytest"):
        found["result"] = result if result is not None else text.strip().splitlines()[-1:]
    else:
        how = code if isinstance(code, str) else f"exit code {code}" if code else "printed no result"
        found |= {"failed": how, "said": text[-_SHOWN:]}
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """Leave nothing of a part running."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def _last_json(text: str) -> Any:
    """Return the last object that was printed as JSON, on one line or on several; more may follow it, such as
    a library's farewell.
    """
    lines = text.splitlines()
    decoder = json.JSONDecoder()
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("{"):
            try:
                return decoder.raw_decode("\n".join(lines[start:]))[0]
            except ValueError:
                continue
    return None


# -- goals


def _get(results: Mapping[str, Any], part: str, *keys: str) -> Any:
    value = results.get(part, {}).get("result")
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def goals(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Set what was measured beside what was wanted; what was not measured is left out."""
    rows: list[tuple[str, float | None, str, float]] = []
    kernels = results.get("kernels", {}).get("result") or {}
    for name in ("adamw", "sum of squares"):
        rows.append((f"{name}: of a copy", kernels.get(name, {}).get("of_copy"), ">=", 0.92))
    plain, peak = _get(results, "torch", "tokens_per_s"), _get(results, "device", "matmul_tflops")
    layers, width, _, context = SIZES["1500m"]
    for stage in _STAGES:
        speed = _get(results, stage, "tokens_per_s")
        if speed and plain:
            rows.append((f"{stage}: of plain torch", speed / plain, ">=", 0.98))
        if speed and peak and not results.get("rehearsed"):
            flops = flops_of_a_token(layers, width, context, _get(results, stage, "parameters"))
            rows.append((f"{stage}: MFU", speed * flops / (peak * 1e12), ">=", 0.45))
    bounds = _get(results, "bounds")
    step, compute = _get(results, "offload optimizer 24", "step_s"), _get(results, "stage 2", "step_s")
    if bounds and step:
        longest = max(value for value in (*bounds.values(), compute) if value)
        rows.append(("offloaded step: over its bound", step / longest, "<=", 1.15))
    if rests := _get(results, "narrow 24", "bytes_of_a_parameter"):
        rows.append(("narrow state and masters: bytes of a parameter", rests, "<=", 4.2))
    for part in ("waits", "waits at stage 3"):
        waits = _get(results, part, "waits_of_a_step")
        if waits is not None:
            rows.append((f"{part}: of a step", float(sum(waits.values())), "<=", 0.0))
    return [
        {
            "what": what,
            "measured": round(value, 3),
            "goal": f"{sign} {goal:g}",
            "verdict": "pass" if (value >= goal if sign == ">=" else value <= goal) else "short",
        }
        for what, value, sign, goal in rows
        if value is not None
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="all", help="first, second, all, or names with commas")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit for all parts")
    default = Path(os.environ.get("OUT", "gpu-results"))
    parser.add_argument("--out", type=Path, default=default, help="default: $OUT, or gpu-results")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    known = {part.name: part for part in GROUPS["all"]}
    names = [part.name for part in GROUPS[args.parts]] if args.parts in GROUPS else args.parts.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path, log = args.out / "results.json", args.out / "log.txt"
    try:
        results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        parser.error(f"{path} is not JSON: move it away, or choose another --out")
    if results and results.get("rehearsed", False) != args.rehearse:
        parser.error(f"{path} is of {'real runs' if args.rehearse else 'a rehearsal'}: choose another --out")
    results["rehearsed"] = args.rehearse
    ends, failed = time.monotonic() + 60 * args.minutes, False
    for name in names:
        part, left = known[name], ends - time.monotonic()
        limit_s = part.limit_s * (_SLOWER if args.rehearse else 1)
        if args.rehearse and part.rehearsal is None:
            found = {"left out": "needs a GPU"}
        elif left < 5:
            found = {"left out": "no time was left"}
        else:
            found = run(part, min(limit_s, left), log, rehearse=args.rehearse)
            failed = failed or "failed" in found
        if "result" in found or "result" not in results.get(name, {}):
            results[name] = found  # what an earlier run has measured stays
        results["goals"] = [] if args.rehearse else goals(results)
        written = path.with_suffix(".new")
        written.write_text(json.dumps(results, indent=1) + "\n")
        written.replace(path)
        shown = {key: value for key, value in found.items() if key != "said"}
        print(f"{name}: {json.dumps(shown)}", flush=True)
        if last := found.get("said", "").strip().splitlines()[-1:]:
            print(f"  {last[0][:300]}", flush=True)
    for row in results["goals"]:
        print(f"{row['verdict']:5}  {row['what']:40} {row['measured']:>8}  ({row['goal']})")
    if missing := [name for name in known if "result" not in results.get(name, {})]:
        print(f"no result: {', '.join(missing)}. Run again with --parts {','.join(missing)!r}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
