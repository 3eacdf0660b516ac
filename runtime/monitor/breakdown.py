"""Prints how a step's time is split: ``wall_clock_breakdown``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..log import show
from .monitor import Monitor
from .step_clock import PARTS, TimedStep
from .trackers import Event


class WallClockBreakdown:
    """Prints a line every ``every`` steps where it ``prints``, and hands the times to the trackers. On a GPU
    the line of a step is printed after the next one, so that nobody waits for the device.
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
