"""Writes a trace of some steps by torch's profiler, for Perfetto or chrome://tracing."""

from __future__ import annotations

import atexit
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from ..log import fail, show
from ..profiler import is_profiled
from .step_clock import TimedStep


class StepTrace:
    """Records steps ``first`` to ``last`` of this process, all of its work in them. What fails is told, and
    training goes on.
    """

    is_taken = False
    """Tells that an engine of this process records already."""

    def __init__(self, first: int, last: int, path: Path, *, on_gpu: bool) -> None:
        """Record into ``path``, a name that ends in ``.json.gz``. Steps are counted from here."""
        StepTrace.is_taken = True
        self._first, self._last, self._path = first, last, path
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
        self.is_on, self._is_done = False, True
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
