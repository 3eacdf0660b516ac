"""Times an engine's forward, backward and step, and what they wait for."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping

import torch

from ..comm.pending import waits

PARTS = ("forward", "backward", "step")
COMMUNICATION = "communication"
DISK = "disk"
_Mark = float | torch.cuda.Event
_MOST_SPANS = 1000
"""Spans of one step, after which those that are known are added up."""


def _nothing() -> None:
    return None


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]  # torch's own


class TimedStep:
    """Holds how long one step and its parts took. ``"forward"``, ``"backward"``, ``"step"`` and ``"all"`` are
    whole times. Waits such as ``"communication"`` are parts of these; of a forward pass, it counts as
    ``"communication in forward"`` as well.
    """

    def __init__(self, before: int) -> None:
        """Begin a step when ``before`` steps have been made."""
        self.before = before
        self.number = self.samples = 0
        """Number the step, and count the samples up to its end."""
        self._sums: dict[str, float] = {}
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, name: str, milliseconds: float) -> None:
        """Add a time that is known."""
        self._sums[name] = self._sums.get(name, 0.0) + milliseconds

    def add_span(self, name: str, start: _Mark, stop: _Mark) -> None:
        """Add the time between two marks; on a GPU it is known when the device has come there."""
        if isinstance(start, float):
            assert isinstance(stop, float)
            self.add(name, (stop - start) * 1e3)
            return
        assert not isinstance(stop, float)
        self._spans.append((name, start, stop))
        if len(self._spans) % _MOST_SPANS == 0:  # those that the device has come to: nobody waits for it
            over = (index for index, span in enumerate(self._spans) if not _is_over(span[2]))
            self._add_up(next(over, len(self._spans)))

    def milliseconds(self) -> dict[str, float]:
        """Return the milliseconds by name; on a GPU, wait until the device has come to the last mark."""
        self._add_up(len(self._spans))
        return self._sums

    def _add_up(self, count: int) -> None:
        for name, start, stop in self._spans[:count]:
            stop.synchronize()
            self.add(name, float(start.elapsed_time(stop)))
        del self._spans[:count]


class TimedPart:
    """Times what is done inside of the context; a class, as the least that a call can cost."""

    __slots__ = ("_clock", "_name", "_outer", "_start")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self._name = name if name != "forward" or torch.is_grad_enabled() else ""

    def __enter__(self) -> None:
        if self._name:
            self._outer, self._start = self._clock._enter(self._name)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._name:
            self._clock._leave(self._name, self._outer, self._start, failed=error is not None)


class StepClock:
    """Times an engine's calls. On a GPU the marks are events on the present stream, and who reads a step
    after the next one's end waits for nothing.

    The rest of a step's time is what the script does between the calls: data, evaluation, a loss of its own.
    """

    def __init__(
        self,
        device: torch.device,
        counters: Callable[[], tuple[int, int]],
        waited: Mapping[str, Callable[[], float]],
    ) -> None:
        """Time on ``device``; ``counters`` returns the engine's steps and samples, ``waited`` gives by name
        the seconds that this process has waited so far.
        """
        self.on_gpu = device.type == "cuda"
        self.listeners: list[Callable[[TimedStep], None]] = []
        """Are called at the end of each step."""
        self.on_jump: Callable[[], None] = _nothing
        """Is called at the end of a step before which a checkpoint was loaded."""
        self._counters = counters
        self._waited = tuple(waited.items())
        self._last = self._mark()
        self._step = TimedStep(counters()[0])
        self._part = "rest"
        self._before = {name: read() for name, read in self._waited}
        clock = weakref.ref(self)

        def on_stream(wait: Callable[[], object]) -> None:
            alive = clock()
            if alive is None:
                wait()
            else:
                alive._wait_on_stream(wait)

        self._on_stream = on_stream

    def part(self, name: str) -> TimedPart:
        """Return a context that times a part of a step; the ``"step"`` in which the engine makes its step is
        the last. A forward pass without gradients is part of the rest.
        """
        return TimedPart(self, name)

    def _enter(self, name: str) -> tuple[str, _Mark]:
        """Begin a part; return the one around it, and the mark."""
        outer = self._part
        self._part = name
        if self.on_gpu:  # of several engines, the one that works now
            waits.on_stream = self._on_stream
        self._add_waits(outer)
        return outer, self._mark()

    def _leave(self, name: str, outer: str, start: _Mark, *, failed: bool) -> None:
        if failed:  # after an error of the device a mark would raise another one
            self._part = outer
            return
        stop = self._mark()
        self._add_waits(self._part)
        self._part = outer
        if outer != name:  # a whole step's passes are one part, and have parts of the same name
            self._step.add_span(name, start, stop)
        if name == "step":
            self._end(stop)

    def _add_waits(self, part: str) -> None:
        """Add what has been waited since the last call, in that part."""
        for name, read in self._waited:
            seconds = read()
            before = self._before[name]
            if seconds != before:
                milliseconds = (seconds - before) * 1e3
                self._before[name] = seconds
                self._step.add(name, milliseconds)
                self._step.add(f"{name} in {part}", milliseconds)

    def _wait_on_stream(self, wait: Callable[[], object]) -> None:
        start = self._mark()
        wait()
        stop = self._mark()
        self._step.add_span(COMMUNICATION, start, stop)
        self._step.add_span(f"{COMMUNICATION} in {self._part}", start, stop)

    def _end(self, stop: _Mark) -> None:
        steps, samples = self._counters()
        done = self._step
        if steps == done.before:
            return
        begin = self._last
        self._last = stop
        self._step = TimedStep(steps)
        if steps != done.before + 1:  # a checkpoint was loaded in between
            self.on_jump()
            return
        done.number = steps
        done.samples = samples
        done.add_span("all", begin, stop)
        for listen in self.listeners:
            listen(done)

    def _mark(self) -> _Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event
