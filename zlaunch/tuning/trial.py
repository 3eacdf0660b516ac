"""Run a script with one config for some steps, and read how fast it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from zlaunch.plan.checks import replace_config
from zlaunch.runtime.trust import make_folder
from zlaunch.supervisor import run_folder
from zlaunch.supervisor.run_files import EventFile
from zlaunch.system.events import Event
from zlaunch.system.processes import die_with_parent
from zlaunch.tuning.search import NO_STEP, OK, OUT_OF_MEMORY, Trial
from zlaunch.tuning.variants import BatchSizes, Variant

_LOADED = re.compile(r"zlaunch: loaded (.+ \(step \d+), saved by ")
"""Matches the checkpointer's line about a load."""
_POLL_S = 0.1
_WAIT_S = 60.0
"""Seconds that a run has to end after it was asked to."""
_OOM = (
    *("OutOfMemoryError", "CUDA out of memory", "MemoryPlanError", "DefaultCPUAllocator: can't allocate"),
    "out of host memory: the kernel",
)
"""Is found in what a rank that ran out of memory says, or the kernel of it."""


@dataclass(frozen=True, slots=True)
class TunedCommand:
    """Says what is run: the launch's options, the script's command line, and where its config is in it."""

    options: tuple[str, ...]
    command: tuple[str, ...]
    config: str
    """The file's name as it stands there."""
    path: str
    """The file, from here."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Says how long a run goes on."""

    warmup: int
    steps: int
    seconds: float


def run_trial(
    program: TunedCommand, config: dict[str, Any], variant: Variant, folder: Path, limits: TrialLimits
) -> Trial:
    """Run a script with a config until enough steps are timed, and end it. What it prints goes to files."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    make_folder(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "steps_per_print": 1}, indent=1) + "\n")
    command = [
        *(sys.executable, "-m", "zlaunch", "--run_dir", str(folder), *program.options),
        *replace_config(program.command, program.config, str(path.absolute())),
    ]
    start = time.monotonic()
    watch = StepTimes(limits)
    events = EventFile(folder / "events.jsonl")
    with open(folder / "console.log", "wb") as console:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        try:
            while (
                process.poll() is None and not watch.is_enough and time.monotonic() - start < limits.seconds
            ):
                watch.take_all(events.read())
                time.sleep(_POLL_S)
        finally:
            _end(process)
    watch.take_all(events.read())
    trial = watch.trial(variant, process.returncode, time.monotonic() - start)
    if trial.verdict == NO_STEP:
        return replace(trial, verdict=f"{NO_STEP}: {why_no_step(folder / 'console.log')}")
    return trial


def why_no_step(console: Path) -> str:
    """Return what the script did instead of a step, by its output."""
    lines = console.read_text(errors="replace").splitlines()
    loaded = [_LOADED.search(line) for line in lines]
    checkpoint = next((found[1] for found in reversed(loaded) if found is not None), None)
    if checkpoint is not None:
        return f"it loaded {checkpoint})"
    own = (line.strip() for line in reversed(lines) if not line.startswith("zlaunch: "))
    last = next((line for line in own if line), None)
    return "it printed nothing" if last is None else f'it printed "{last}" last'


def read_batch(folder: Path) -> BatchSizes | None:
    """Return the batch sizes of a run, as the runtime has taken them; None where it did not come so far."""
    config = run_folder.read_json(folder / "config.effective.json").get("config", {})
    record = run_folder.read(folder)
    micro = config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps")
    if record is None or not isinstance(micro, int) or not isinstance(steps, int) or min(micro, steps) < 1:
        return None
    return BatchSizes(micro, steps, record.world_size)


def read_rows(folder: Path) -> int | None:
    """Return how many rows a micro-batch of a run really had, by the first tensor of the model's input."""
    rows = None
    for event in EventFile(folder / "events.jsonl").read():
        values = event.get("values")
        if event.get("type") == "metrics" and event.get("rank") == 0 and isinstance(values, dict):
            rows = values.get("rows", rows)
    return int(rows) if isinstance(rows, (int, float)) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run; the launcher ends all that belongs to it."""
    for signum in (signal.SIGTERM, signal.SIGTERM):
        if process.poll() is not None:
            return
        process.send_signal(signum)
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class _Report:
    """Holds rank 0's report of a step. The rates cover the time since the report before it."""

    step: int
    when: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float


class StepTimes:
    """Follows the steps of a run by its events."""

    def __init__(self, limits: TrialLimits) -> None:
        self._limits = limits
        self._reports: list[_Report] = []
        self._memory: dict[int, float] = {}
        self._host: dict[int, float] = {}
        self._errors: list[str] = []

    @property
    def is_enough(self) -> bool:
        """Tell whether enough steps have been timed."""
        steps = self._reports[-1].step - self._reports[0].step if self._reports else 0
        return bool(self._reports) and steps >= self._limits.warmup + self._limits.steps

    def take_all(self, events: Iterable[Event]) -> None:
        """Take events in their order."""
        for event in events:
            kind = event.get("type")
            values = event.get("values")
            if kind == "exception":
                self._errors.append(str(event.get("exception")))
            elif kind == "error":
                self._errors.append(str(event.get("message")))
            elif kind == "exit" and str(event.get("reason")).startswith(_OOM[-1]):
                self._errors.append(str(event["reason"]))
            elif kind == "metrics" and isinstance(values, dict) and isinstance(event.get("rank"), int):
                self._metrics(event["rank"], values, float(event.get("time", 0.0)))

    def _metrics(self, rank: int, values: dict[str, Any], when: float) -> None:
        for name, kept in (("memory_gb", self._memory), ("host_gb", self._host)):
            if isinstance(values.get(name), (int, float)):
                kept[rank] = max(kept.get(rank, 0.0), float(values[name]))
        if rank == 0 and isinstance(values.get("engine_step"), int) and "samples_per_s" in values:
            samples = float(values["samples_per_s"])
            tokens = float(values.get("tokens_per_s", 0.0))
            mfu = float(values.get("mfu", 0.0))
            self._reports.append(_Report(values["engine_step"], when, samples, tokens, mfu))

    def trial(self, variant: Variant, code: int, seconds: float) -> Trial:
        """Return what came of the run, which has ended with an exit code."""
        most = (max(self._memory.values(), default=0.0), max(self._host.values(), default=0.0))
        first = self._reports[0].step if self._reports else 0
        timed = [report for report in self._reports if report.step >= first + self._limits.warmup]
        if not self.is_enough:
            if any(word in error for error in self._errors for word in _OOM):
                return Trial(variant, OUT_OF_MEMORY, 0.0, 0.0, *most, seconds)
            if self._errors:
                return Trial(variant, f"failed: {self._errors[0].splitlines()[0]}", 0.0, 0.0, *most, seconds)
            timed = timed if len(timed) >= 2 else self._reports[1:]
        if len(timed) < 2 or timed[-1].when <= timed[0].when:
            return Trial(variant, self._why(code, seconds), 0.0, 0.0, *most, seconds)
        # The median leaves out a step that something else has held up.
        each = [(b.when - a.when) / max(b.step - a.step, 1) for a, b in pairwise(timed)]
        speed = 1 / max(median(each), 1e-9)

        def rate(reported: Iterable[float]) -> float:
            """Return a reported rate at `speed`: separate medians would be of different steps."""
            return speed * median(value * step_s for value, step_s in zip(reported, each, strict=True))

        tokens = rate(report.tokens_per_s for report in timed[1:])
        samples = rate(report.samples_per_s for report in timed[1:])
        mfu = rate(report.mfu for report in timed[1:])
        return Trial(variant, OK, speed, tokens, *most, seconds, samples, mfu)

    def _why(self, code: int, seconds: float) -> str:
        if code == 0 and not self._reports:
            return NO_STEP
        if seconds >= self._limits.seconds:
            return f"{len(self._reports)} steps in {seconds:.0f} s"
        return f"ended with exit code {code} after {len(self._reports)} steps"
