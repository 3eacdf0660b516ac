"""``deepspeed.utils.timer``: named timers of a script's own parts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zlaunch.compat.deepspeed.missing import missing_class
from zlaunch.compat.deepspeed.tools import print_dist

_TRIMMED = 0.1
"""The share of the shortest times, and of the longest, that a mean leaves out."""
_GIB = 1 << 30


class NamedTimer:
    """Measures the times between :meth:`start` and :meth:`stop`, in milliseconds.

    On a GPU they are those between two events on the present stream, and reading them waits for the second.
    """

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.elapsed_records: list[float] = []
        self._since: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Measure from now on. Raises RuntimeError if it does so already."""
        if self.started_:
            raise RuntimeError(f"timer {self.name_} has been started already")
        self._since = _mark()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Measure up to now. `reset` and `record` change nothing, as in DeepSpeed. Raises RuntimeError if it
        was not started.
        """
        if not self.started_:
            raise RuntimeError(f"timer {self.name_} is not started")
        self._spans.append((self._since, _mark()))
        self.started_ = False

    def reset(self) -> None:
        """Forget all times."""
        self.started_ = False
        self.elapsed_records = []
        self._spans.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum of the times in milliseconds; a time that runs is ended, and another one begun."""
        is_running = self.started_
        if is_running:
            self.stop()
        self.elapsed_records = [_milliseconds(*span) for span in self._spans]
        total = sum(self.elapsed_records)
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean time in milliseconds, without the tenth that is shortest and the longest; 0 where
        there is none.
        """
        self.elapsed(reset=False)
        return trim_mean(self.elapsed_records, _TRIMMED)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without the smallest and the largest numbers, a share `trim_percent` of each; 0 where
    nothing is left. Raises ValueError for a share outside of 0 to 1.
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise ValueError(f"trim_percent: expected a number from 0 to 1, got {trim_percent}")
    left_out = round(len(data) * trim_percent)
    kept = sorted(data)[left_out : len(data) - left_out]
    return sum(kept) / len(kept) if kept else 0.0


def _mark() -> Any:
    """Return the time, on a GPU as an event on its stream."""
    if not torch.cuda.is_available():
        return time.time()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    event.record()
    return event


def _milliseconds(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first) * 1000
    second.synchronize()
    return float(first.elapsed_time(second))


class SynchronizedWallClockTimer:
    """Makes timers by name: ``timers("forward").start()``."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        """Return the timer with this name, a new one at first."""
        if name not in self.timers:
            self.timers[name] = NamedTimer(name)
        return self.timers[name]

    def get_timers(self) -> dict[str, NamedTimer]:
        """Return all timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Describe torch's GPU memory in GB."""
        is_there = torch.cuda.is_available()
        amounts = {
            "mem_allocated": torch.cuda.memory_allocated() if is_there else 0,
            "max_mem_allocated": torch.cuda.max_memory_allocated() if is_there else 0,
            "cache_allocated": torch.cuda.memory_reserved() if is_there else 0,
            "max_cache_allocated": torch.cuda.max_memory_reserved() if is_there else 0,
        }
        return "".join(f" | {name}: {nbytes / _GIB:.4f} GB" for name, nbytes in amounts.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the sums of these timers on some ranks (the first by default), divided by `normalizer`.
        `memory_breakdown` changes nothing, as in DeepSpeed.
        """
        _check(normalizer)
        known = [name for name in names if name in self.timers]
        times = "".join(
            f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known
        )
        print_dist(f"time (ms){times}", ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return a thousand times the means of these timers, as DeepSpeed does, divided by `normalizer`.
        `reset` changes nothing, as in DeepSpeed.
        """
        _check(normalizer)
        return {name: self.timers[name].mean() * 1000.0 / normalizer for name in names if name in self.timers}


def _check(normalizer: float) -> None:
    if not normalizer > 0:
        raise ValueError(f"normalizer: expected a number above 0, got {normalizer}")


class NoopTimer:
    """Has the methods of :class:`SynchronizedWallClockTimer`, and measures nothing."""

    class Timer:
        """Measures nothing."""

        def start(self) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def stop(self, **options: Any) -> None:
            """Do nothing."""

        def elapsed(self, **options: Any) -> float:
            """Return 0."""
            return 0

        def mean(self) -> float:
            """Return 0."""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """Return the timer that all names have."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def log(self, names: Iterable[str], *args: Any, **options: Any) -> None:
        """Do nothing."""

    def get_mean(self, names: Iterable[str], *args: Any, **options: Any) -> None:
        """Return None."""


ThroughputTimer = missing_class(
    "utils.timer.ThroughputTimer", "engine.tput_timer measures samples per second"
)
CudaEventTimer = missing_class("utils.timer.CudaEventTimer", "use SynchronizedWallClockTimer")
