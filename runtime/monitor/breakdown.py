"""Prints how a step's time is split, and the memory after it."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from ..log import show
from .monitor import Monitor
from .step_clock import PARTS, TimedStep
from .trackers import Event

_PAGE_BYTES = resource.getpagesize()


class WallClockBreakdown:
    """Prints a line of ``wall_clock_breakdown`` every ``every`` steps where it ``prints``, and hands the
    times to the trackers. On a GPU a step's line is printed after the next one, so that nobody waits for it.
    """

    def __init__(self, monitor: Monitor, every: int, *, prints: bool, on_gpu: bool) -> None:
        self._monitor, self._every, self._prints, self._on_gpu = monitor, every, prints, on_gpu
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
        self._every, self._on_gpu = every, on_gpu

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
