"""Prints how a step's time is split, and the memory after it."""

from __future__ import annotations

import atexit
import resource
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..device import is_profiled
from ..log import fail, show
from .clock import PARTS, TimedStep
from .trackers import Event, Monitor

# -- breakdown --------------------------------------------------------------------------------------


_PAGE_BYTES = resource.getpagesize()


class WallClockBreakdown:
    """Prints a line of ``wall_clock_breakdown`` every ``every`` steps where it ``prints``, and hands the
    times to the trackers. On a GPU a step's line is printed after the next one, so that nobody waits for it.
    """

    def __init__(self, monitor: Monitor, every: int, *, prints: bool, on_gpu: bool) -> None:
        self._monitor = monitor
        self._every = every
        self._prints = prints
        self._on_gpu = on_gpu
        self._unprinted: deque[TimedStep] = deque()

    def after_step(self, step: TimedStep) -> None:
        """Take a step that has just been made."""
        self._monitor.expect(step.samples, not self._on_gpu, lambda: _events(step))
        if not self._prints:
            return
        self._unprinted.append(step)
        ready = len(self._unprinted) - self._on_gpu
        if ready and self._unprinted[ready - 1].number % self._every == 0:
            self._print([self._unprinted.popleft() for _ in range(ready)])

    def _print(self, steps: Sequence[TimedStep]) -> None:
        means = mean_milliseconds(steps)
        parts = [f"{name} {means[name]:.2f}" if name in means else f"{name} -" for name in PARTS]
        rest = means["all"] - sum(means.get(name, 0.0) for name in PARTS)
        count = f", mean of {len(steps)} steps" if len(steps) > 1 else ""
        show(f"zlaunch: time (ms) of step {steps[-1].number}: {', '.join(parts)}, rest {rest:.2f}{count}")


class MemoryBreakdown:
    """Prints this process's memory every ``every`` steps: ``memory_breakdown``."""

    def __init__(self, every: int, *, on_gpu: bool) -> None:
        self._every = every
        self._on_gpu = on_gpu

    def after_step(self, step: TimedStep) -> None:
        """Take a step that has just been made."""
        if step.number % self._every:
            return
        parts = []
        if self._on_gpu:
            parts = [
                f"allocated {torch.cuda.memory_allocated() / 1e9:.3f}",
                f"peak {torch.cuda.max_memory_allocated() / 1e9:.3f}",
                f"reserved {torch.cuda.memory_reserved() / 1e9:.3f}",
            ]
        parts.append(f"host {host_gb():.3f}")
        show(f"zlaunch: memory (GB) after step {step.number}: {', '.join(parts)}")


def host_gb() -> float:
    """Return what this process has in host memory, in 1e9 bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / 1e9


def mean_milliseconds(steps: Sequence[TimedStep]) -> dict[str, float]:
    """Return the mean of each time over the steps, by name."""
    means: dict[str, float] = {}
    for step in steps:
        for name, value in step.milliseconds().items():
            means[name] = means.get(name, 0.0) + value / len(steps)
    return means


def _events(step: TimedStep) -> list[Event]:
    sums = step.milliseconds()
    return [
        (f"Train/Samples/elapsed_time_ms_{name}", sums[name], step.samples) for name in PARTS if name in sums
    ]


# -- trace ------------------------------------------------------------------------------------------
#
# Writes a trace of some steps by torch's profiler, for Perfetto or chrome://tracing.


class StepTrace:
    """Records steps ``first`` to ``last`` of this process, all of its work in them. What fails is told, and
    training goes on.
    """

    is_taken = False
    """Tells that an engine of this process records already."""

    def __init__(self, first: int, last: int, path: Path, *, on_gpu: bool) -> None:
        """Record into ``path``, a name that ends in ``.json.gz``. Steps are counted from here."""
        StepTrace.is_taken = True
        self._first = first
        self._last = last
        self._path = path
        self._made = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profile(activities=activities)
        self.is_on = False
        self._is_done = False
        atexit.register(self.finish)
        if first == 1:
            self._start()

    def after_step(self, step: TimedStep) -> None:
        """Begin or end at the end of a step."""
        self._made += 1
        if self.is_on and self._made >= self._last:
            self.finish()
        elif not self.is_on and not self._is_done and self._made >= self._first - 1:
            self._start()

    def _start(self) -> None:
        try:
            if is_profiled():
                raise RuntimeError("the script runs its own profiler")
            self._profile.start()
        except RuntimeError as error:
            self._give_up(error)
        else:
            self.is_on = True

    def finish(self) -> None:
        """End the recording and write the file. A second call does nothing."""
        atexit.unregister(self.finish)
        if not self.is_on and not self._is_done:
            fail(f"no trace: the run ended at step {self._made}, before step {self._first}")
        if not self.is_on:
            return
        self.is_on = False
        self._is_done = True
        try:
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        else:
            show(f"zlaunch: trace: {self._path} (open it in https://ui.perfetto.dev)")

    def _give_up(self, error: Exception) -> None:
        self._is_done = True
        fail(f"no trace in {self._path}: {error}; training continues")
