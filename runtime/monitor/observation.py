"""Surrounds an engine's calls with what observes them: the clock, the reports, advice on memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..comm.collectives import Comm
from ..comm.waits import waits
from ..config import Config, Effective
from ..environment import read_environment
from ..errors import LossScaleFloorError, MonitorError
from ..memory.advice import raise_with_advice
from ..profiler import named
from .breakdown import MemoryBreakdown, WallClockBreakdown
from .flops_profiler import FlopsProfiler
from .monitor import Monitor
from .step_clock import COMMUNICATION, StepClock, TimedPart
from .step_reporter import ReportedLoop, StepCosts, StepReporter
from .total_steps import PlannedLoop, find_total_steps
from .trace import StepTrace

_NOTHING: Mapping[str, Any] = {}
Around = Callable[..., AbstractContextManager[None]]
"""Gives a context for a call: its name, and of a forward pass the model's arguments."""


class ObservedLoop(ReportedLoop, PlannedLoop, Protocol):
    """Has a model and a device besides what is reported."""

    module: nn.Module

    @property
    def device(self) -> torch.device: ...


def open_monitor(effective: Effective, comm: Comm) -> Monitor:
    """Open the trackers. Raises MonitorError on every rank where rank 0 cannot."""
    monitor, problem = None, None
    try:
        monitor = Monitor(effective.config, comm.rank)
    except MonitorError as error:
        problem = str(error)
    for rank, text in enumerate(comm.exchange(problem) if monitor is None or monitor.enabled else ()):
        if text is not None:
            if monitor is not None:
                monitor.close()
            raise MonitorError(text if rank == comm.rank else f"on rank {rank}, {text}")
    assert monitor is not None
    return monitor


def observe(
    engine: ObservedLoop,
    config: Config,
    monitor: Monitor,
    more_waits: Mapping[str, Callable[[], float]],
    explain: Callable[[int, str], str],
    costs: StepCosts,
    overflow_hint: str,
) -> Around:
    """Return what surrounds an engine's forward, backward and step. ``more_waits``: by name, the seconds that
    this process has waited for something besides communication; ``explain`` returns what is added to the
    error where so many bytes could not be allocated in such a call; ``overflow_hint`` is added where the
    loss scale cannot shrink any further.
    """
    on_gpu = engine.device.type == "cuda"
    # A stream waits for NCCL, and marks around that are what the clock reads there.
    known = {} if on_gpu or engine.world_size == 1 else {COMMUNICATION: lambda: waits.seconds}
    clock = StepClock(
        engine.device, lambda: (engine.global_steps, engine.global_samples), {**known, **more_waits}
    )
    every = int(config.steps_per_print or 1)
    if config.memory_breakdown and engine.global_rank == 0:
        clock.listeners.append(MemoryBreakdown(every, on_gpu=on_gpu).after_step)
    if config.wall_clock_breakdown:
        breakdown = WallClockBreakdown(monitor, every, prints=engine.global_rank == 0, on_gpu=on_gpu)
        clock.listeners.append(breakdown.after_step)
    reporter = StepReporter(
        engine,
        every=config.steps_per_print,
        total_steps=lambda: find_total_steps(config, engine),
        on_gpu=on_gpu,
        costs=costs,
    )
    clock.listeners.append(reporter.after_step)
    clock.on_jump = reporter.forget
    trace = _trace(engine.global_rank, on_gpu=on_gpu)
    if trace is not None:
        clock.listeners.append(trace.after_step)
    profiler = None
    if config.flops_profiler.enabled and engine.global_rank == 0:
        profiler = FlopsProfiler(
            engine.module,
            config.flops_profiler,
            lambda: engine.global_steps,
            reporter.take_flops,
        )

    def around(
        name: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> AbstractContextManager[None]:
        if torch.compiler.is_compiling():  # a clock would break the graph
            return nullcontext()
        if args or kwargs:
            reporter.count_tokens(args, kwargs)
        call: AbstractContextManager[None] = ObservedCall(clock, name, explain, overflow_hint)
        if trace is not None and trace.is_on:
            call = _both(named(name), call)
        return call if profiler is None else profiler.surround(name, call)

    return around


class ObservedCall(TimedPart):
    """Times a call, and explains what it raises for want of memory, or of range in fp16."""

    __slots__ = ("_explain", "_overflow_hint", "_where")

    def __init__(
        self, clock: StepClock, name: str, explain: Callable[[int, str], str], overflow_hint: str
    ) -> None:
        super().__init__(clock, name)
        self._where, self._explain, self._overflow_hint = name, explain, overflow_hint

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            raise_with_advice(error, self._where, self._explain)
            if isinstance(error, LossScaleFloorError) and self._overflow_hint:
                raise LossScaleFloorError(f"{error}. Cause: {self._overflow_hint}") from error


def _trace(rank: int, *, on_gpu: bool) -> StepTrace | None:
    """Return the trace that `zlaunch --profile` asks for, on rank 0, for the first engine."""
    environment = read_environment()
    if not environment.profile or rank or StepTrace.is_taken:
        return None
    first, _, last = environment.profile.partition("-")
    path = Path(environment.run_dir or ".", "traces", f"rank_{rank:05d}.json.gz")
    return StepTrace(int(first), int(last or first), path, on_gpu=on_gpu)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
