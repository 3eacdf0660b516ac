"""Times forward, backward and step, and prints how a step's time is split."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..log import show
from .monitor import Monitor
from .trackers import Event

_PARTS = ("forward", "backward", "step")
_Mark = float | torch.cuda.Event
_Span = tuple[str, _Mark, _Mark]


class StepClock:
    """Times an engine's calls. On a GPU the marks are events on the present stream, read after the next step,
    so that nobody waits for the device.

    What a script does between the calls (data, a loss of its own) is the rest of the step's time.
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
        self._steps = counters()[0]
        self._last = self._mark()
        self._spans: list[_Span] = []
        self._unprinted: deque[list[_Span]] = deque()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of a step; the one in which the engine makes its step is the last of that step."""
        start = self._mark()
        try:
            yield
        finally:
            stop = self._mark()
            self._spans.append((name, start, stop))
        steps, samples = self._counters()
        if steps != self._steps:
            spans, self._spans = [*self._spans, ("all", self._last, stop)], []
            self._steps, self._last = steps, stop
            self._monitor.expect(samples, not self._on_gpu, lambda: _events(spans, samples))
            if self._prints:
                self._unprinted.append(spans)
                if steps % self._every == 0:
                    self._print(steps)

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event

    def _print(self, steps: int) -> None:
        ready = list(self._unprinted) if not self._on_gpu else list(self._unprinted)[:-1]
        for _ in ready:
            self._unprinted.popleft()
        if not ready:
            return
        total = _sums([span for spans in ready for span in spans])
        means = {name: value / len(ready) for name, value in total.items()}
        parts = [f"{name} {means[name]:.2f}" for name in _PARTS if name in means]
        rest = means["all"] - sum(means.get(name, 0.0) for name in _PARTS)
        count = f", mean of {len(ready)} steps" if len(ready) > 1 else ""
        show(f"zlaunch: time (ms) of step {steps}: {', '.join(parts)}, rest {rest:.2f}{count}")


def _sums(spans: list[_Span]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, start, stop in spans:
        sums[name] = sums.get(name, 0.0) + _milliseconds(start, stop)
    return sums


def _events(spans: list[_Span], samples: int) -> list[Event]:
    sums = _sums(spans)
    return [(f"Train/Samples/elapsed_time_ms_{name}", sums[name], samples) for name in _PARTS if name in sums]


def _milliseconds(start: _Mark, stop: _Mark) -> float:
    if isinstance(start, float):
        assert isinstance(stop, float)
        return (stop - start) * 1e3
    assert not isinstance(stop, float)
    stop.synchronize()
    return float(start.elapsed_time(stop))
