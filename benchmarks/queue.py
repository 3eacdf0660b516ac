"""Measure the queue: how much of the time its slots are in use, or what a sweep costs.

    python -m benchmarks.queue use [--runs 200] [--slots 6] [--seconds 2] [--out FILE.json]
    python -m benchmarks.queue sweep [--trials 1000] [--slots 4] [--seconds 10] [--window 60]

Each run sleeps. `use`: its start and end count as use of the slot; the gap before the next run counts as
lost. `sweep`: the CPU time of the queue's daemon and of the `zlaunch sweep` command, as shares of one core,
while most of the trials wait.
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
    """Run the measurement in a temporary queue and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    use = kinds.add_parser("use")
    sweep = kinds.add_parser("sweep")
    use.add_argument("--runs", type=int, default=200)
    use.add_argument("--slots", type=int, default=6)
    use.add_argument("--seconds", type=float, default=2.0)
    sweep.add_argument("--trials", type=int, default=1000)
    sweep.add_argument("--slots", type=int, default=4)
    sweep.add_argument("--seconds", type=float, default=10.0)
    sweep.add_argument("--window", type=float, default=60.0, help="Measure for this many seconds.")
    for kind in (use, sweep):
        kind.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scene = _Scene(Path(name), options.slots, options.seconds)
        if options.kind == "use":
            found = {"runs": options.runs, "share_of_each_slot": scene.measure_use(options.runs)}
        else:
            found = {"trials": options.trials, **scene.measure_sweep(options.trials, options.window)}
    machine = {"cores": os.cpu_count(), "machine": platform.machine()}
    result = {"slots": options.slots, "seconds": options.seconds, **found, **machine}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


class _Scene:
    """A temporary queue with its slots, and a folder with a script that sleeps."""

    def __init__(self, folder: Path, slots: int, seconds: float) -> None:
        (folder / "train.py").write_text(f"import time\ntime.sleep({seconds})\n")
        (folder / "hosts").write_text(f"localhost slots={slots}\n")
        self._folder = folder
        self._slots = slots
        self._environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
        self._options = ("--queue=local", "--hostfile=hosts", "--num_gpus=1", "--no_local_rank", "--quiet")

    def measure_use(self, runs: int) -> dict[str, float]:
        """Return the share of the time that each slot has a run, from when all have one until none waits."""
        words = ["submit", *self._options, "train.py"]
        submit = f"from zlaunch.cli.main import main\nfor i in range({runs}): assert main({words}) == 0"
        self._run("-c", submit)
        jobs = self._jobs()
        while not all(job["state"] == "ended" for job in jobs):
            time.sleep(_POLL_S)
            jobs = self._jobs()
        assert len(jobs) == runs and all(job["exit_code"] == 0 for job in jobs)
        begin = sorted(job["started"] for job in jobs)[self._slots - 1]
        end = max(job["started"] for job in jobs)
        held: Counter[str] = Counter()
        for job in jobs:
            [(host, [slot])] = job["slots"].items()
            held[f"{host}:{slot}"] += max(0.0, min(job["ended"], end) - max(job["started"], begin))
        return {slot: round(time_s / (end - begin), 4) for slot, time_s in sorted(held.items())}

    def measure_sweep(self, trials: int, window_s: float) -> dict[str, float]:
        """Return the shares of a core that the daemon and the sweep use while trials run."""
        values = "\n".join(["--lr", *map(str, range(trials))])
        (self._folder / "values.csv").write_text(values + "\n")
        words = ["-m", "zlaunch", "sweep", "values.csv", *self._options, "--no_preload", "train.py"]
        with open(self._folder / "sweep.log", "wb") as log:
            sweep = subprocess.Popen(
                [sys.executable, *words], cwd=self._folder, env=self._environ, stdout=log, stderr=log
            )
        try:
            self._await_submission(sweep, trials)
            time.sleep(2 * _POLL_S)
            daemon = self._daemon()
            before = (_cpu_s(daemon), _cpu_s(sweep.pid))
            ended = self._ended()
            begin = time.monotonic()
            time.sleep(window_s)
            after = (_cpu_s(daemon), _cpu_s(sweep.pid))
            took_s = time.monotonic() - begin
            count = self._ended() - ended
        finally:
            sweep.terminate()
            sweep.wait()
            self._clear()
        shares = [(late - early) / took_s for early, late in zip(before, after, strict=True)]
        return {
            "ends_per_second": round(count / took_s, 3),
            "share_of_daemon": round(shares[0], 4),
            "share_of_sweep": round(shares[1], 4),
        }

    def _await_submission(self, sweep: subprocess.Popen[bytes], trials: int) -> None:
        while f"{trials} trials in" not in (log := self._log()):
            assert sweep.poll() is None, log
            time.sleep(_POLL_S)

    def _log(self) -> str:
        return (self._folder / "sweep.log").read_text()

    def _ended(self) -> int:
        """Count the trials that the sweep has seen end: it prints a line for each."""
        return self._log().count("--lr=")

    def _daemon(self) -> int:
        [lock] = (self._folder / "state").rglob("daemon.lock")
        pid: int = json.loads(lock.read_text())["pid"]
        return pid

    def _clear(self) -> None:
        """Cancel everything, the newest job first, so that nothing more starts."""
        left = [job for job in self._jobs() if job["state"] != "ended"]
        if left:
            self._run("-m", "zlaunch", "cancel", "--queue=local", *(str(job["id"]) for job in left[::-1]))

    def _jobs(self) -> list[dict[str, Any]]:
        said = self._run("-m", "zlaunch", "queue", "--queue=local", "--all", "--json")
        jobs: list[dict[str, Any]] = json.loads(said)
        return jobs

    def _run(self, *words: str) -> bytes:
        return subprocess.run(
            [sys.executable, *words], cwd=self._folder, env=self._environ, capture_output=True, check=True
        ).stdout


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
