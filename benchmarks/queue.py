"""Measure how much of the time the queue's slots are in use while runs wait.

    python -m benchmarks.queue [--runs 200] [--slots 6] [--seconds 2] [--out FILE.json]

Each run sleeps. Its start and end count as use of the slot; the gap before the next run counts as lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 1.0


def main() -> None:
    """Queue the runs in a queue of their own, and print the share of each slot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shares = measure(Path(name), options.runs, options.slots, options.seconds)
    result = {
        "runs": options.runs,
        "seconds": options.seconds,
        "share_of_each_slot": shares,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(folder: Path, runs: int, slots: int, seconds: float) -> dict[str, float]:
    """Return the share of the time that each slot has a run, from when all have one until none waits."""
    (folder / "train.py").write_text(f"import time\ntime.sleep({seconds})\n")
    (folder / "hosts").write_text(f"localhost slots={slots}\n")
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    words = ["submit", "--queue=local", "--hostfile=hosts", "--num_gpus=1", "--no_local_rank", "--quiet"]
    words.append("train.py")
    submit = f"from zlaunch.cli.main import main\nfor i in range({runs}): assert main({words}) == 0"
    command = [sys.executable, "-c", submit]
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
    show = [sys.executable, "-m", "zlaunch", "queue", "--queue=local", "--all", "--json"]
    while True:
        said = subprocess.run(show, cwd=folder, env=environ, capture_output=True, check=True).stdout
        jobs: list[dict[str, Any]] = json.loads(said)
        if all(job["state"] == "ended" for job in jobs):
            break
        time.sleep(_POLL_S)
    assert len(jobs) == runs and all(job["exit_code"] == 0 for job in jobs)
    begin = sorted(job["started"] for job in jobs)[slots - 1]
    end = max(job["started"] for job in jobs)
    held: Counter[str] = Counter()
    for job in jobs:
        [(host, [slot])] = job["slots"].items()
        held[f"{host}:{slot}"] += max(0.0, min(job["ended"], end) - max(job["started"], begin))
    return {slot: round(time_s / (end - begin), 4) for slot, time_s in sorted(held.items())}


if __name__ == "__main__":
    main()
