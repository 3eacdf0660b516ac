"""``engine.tput_timer``: samples per second, measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

WARM_UP = 2
"""Steps that are not counted, as in DeepSpeed: memory is allocated and kernels are chosen in them."""

_Mark = float | torch.cuda.Event


class ThroughputTimer:
    """Measures the time between :meth:`start` and :meth:`stop`: the engine calls them around each forward
    pass in training mode and its step.

    On a GPU the marks are events on the present stream, so that nobody waits for the device until the number
    is asked for.

    Attributes
        global_step_count: steps that have ended, those of the warm-up among them.
        micro_step_count, epoch_count: what their names say.
    """

    def __init__(
        self, device: torch.device, batch_size: Callable[[], int], start_step: int = WARM_UP
    ) -> None:
        """``batch_size``: samples of a step, over all ranks; ``start_step``: steps to leave out first."""
        self._device, self._batch_size, self.start_step = device, batch_size, start_step
        self.global_step_count = self.micro_step_count = self.epoch_count = 0
        self._since: _Mark | None = None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._elapsed_s, self._samples = 0.0, 0

    @property
    def started(self) -> bool:
        """Tell whether :meth:`stop` will measure something."""
        return self._since is not None

    @property
    def batch_size(self) -> int:
        """Return the samples of a step, over all ranks."""
        return self._batch_size()

    @property
    def total_elapsed_time(self) -> float:
        """Return the seconds measured so far, without the warm-up."""
        while self._open:
            self._settle(wait=True)
        return self._elapsed_s

    def update_epoch_count(self) -> None:
        """Count an epoch; the present step begins anew."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Measure from now on."""
        self._since = self._mark()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Measure up to now, if started; with ``global_step`` a step has ended. ``report_speed`` is accepted:
        the launcher shows the speed.
        """
        since, self._since = self._since, None
        if since is None:
            return
        self.micro_step_count += 1
        if self.global_step_count >= self.start_step:
            now = self._mark()
            if isinstance(since, float) and isinstance(now, float):
                self._elapsed_s += now - since
            elif isinstance(since, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
                self._open.append((since, now))
                while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
                    self._settle()
        if global_step:
            if self.global_step_count >= self.start_step:
                self._samples += self.batch_size
            self.global_step_count += 1

    def avg_samples_per_sec(self) -> float:
        """Divide the samples of the steps measured by their time; minus infinity before there is one, as
        in DeepSpeed.
        """
        elapsed = self.total_elapsed_time
        return self._samples / elapsed if self._samples and elapsed else float("-inf")

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _settle(self, wait: bool = False) -> None:
        first, last = self._open.popleft()
        if wait:
            last.synchronize()
        self._elapsed_s += first.elapsed_time(last) / 1000
