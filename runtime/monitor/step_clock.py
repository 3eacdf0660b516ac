"""Times forward, backward and step, and prints how a step's time is split."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..log import show
from .monitor import Monitor
from .trackers import Event

_PARTS = ("forward", "backward", "step")
_Mark = float | torch.cuda.Event
_Span = tuple[str, _Mark, _Mark]
_MOST_SPANS = 1000
"""Spans of one step that are kept before they are added up; on a GPU that waits for the device."""


@dataclass(slots=True)
class _Step:
    number: int
    sums: dict[str, float]
    spans: list[_Span]

    def add_up(self) -> dict[str, float]:
        """Return the milliseconds of each part."""
        for name, start, stop in self.spans:
            self.sums[name] = self.sums.get(name, 0.0) + _milliseconds(start, stop)
        self.spans.clear()
        return self.sums


class StepClock:
    """Times an engine's calls. On a GPU the marks are events on the present stream, read after the next step,
    so that nobody waits for the device; the line of a step is then printed one step later.

    The rest of a step's time is what the script does between the calls: data, evaluation, a loss of its own.
    """

    def __init__(
        self,
        device: torch.device,
        counters: Callable[[], tuple[int, int]],
        monitor: Monitor,
        every: int,
        *,
        prints: bool,
    ) -> None:
        """Time on ``device``; ``counters`` returns the engine's steps and samples. The split is printed every
        ``every`` steps where ``prints``.
        """
        self._on_gpu = device.type == "cuda"
        self._counters, self._monitor = counters, monitor
        self._every, self._prints = every, prints
        self._last = self._mark()
        self._step = _Step(counters()[0], {}, [])
        self._unprinted: deque[_Step] = deque()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of a step; the ``"step"`` in which the engine makes its step is the last. A forward
        pass without gradients is part of the rest.
        """
        counts = name != "forward" or torch.is_grad_enabled()
        start = self._mark()
        try:
            yield
        finally:
            stop = self._mark()
            if counts:
                self._step.spans.append((name, start, stop))
                if not self._on_gpu or len(self._step.spans) > _MOST_SPANS:
                    self._step.add_up()
        if name == "step":
            self._end(stop)

    def _end(self, stop: _Mark) -> None:
        steps, samples = self._counters()
        done = self._step
        if steps == done.number:
            return
        begin, self._last = self._last, stop
        self._step = _Step(steps, {}, [])
        if steps != done.number + 1:  # a checkpoint was loaded in between
            return
        done.number = steps
        done.spans.append(("all", begin, stop))
        self._monitor.expect(samples, not self._on_gpu, lambda: _events(done, samples))
        if self._prints:
            self._unprinted.append(done)
            ready = len(self._unprinted) - self._on_gpu
            if ready and self._unprinted[ready - 1].number % self._every == 0:
                self._print([self._unprinted.popleft() for _ in range(ready)])

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event

    def _print(self, steps: Sequence[_Step]) -> None:
        means: dict[str, float] = {}
        for step in steps:
            for name, value in step.add_up().items():
                means[name] = means.get(name, 0.0) + value / len(steps)
        parts = [f"{name} {means[name]:.2f}" if name in means else f"{name} -" for name in _PARTS]
        rest = means["all"] - sum(means.get(name, 0.0) for name in _PARTS)
        count = f", mean of {len(steps)} steps" if len(steps) > 1 else ""
        show(f"zlaunch: time (ms) of step {steps[-1].number}: {', '.join(parts)}, rest {rest:.2f}{count}")


def _events(step: _Step, samples: int) -> list[Event]:
    sums = step.add_up()
    return [(f"Train/Samples/elapsed_time_ms_{name}", sums[name], samples) for name in _PARTS if name in sums]


def _milliseconds(start: _Mark, stop: _Mark) -> float:
    if isinstance(start, float):
        assert isinstance(stop, float)
        return (stop - start) * 1e3
    assert not isinstance(stop, float)
    stop.synchronize()
    return float(start.elapsed_time(stop))
