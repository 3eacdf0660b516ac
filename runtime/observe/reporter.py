"""Reports an engine's steps to the launcher: metrics, speed, memory, and where a step's time goes."""

from __future__ import annotations

import atexit
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import waits
from ..config import Config, Effective
from ..device import HostCopy, named
from ..engine import Engine
from ..environment import read_environment
from ..errors import LossScaleFloorError, MonitorError
from ..log import fail
from ..memory.advice import raise_with_advice
from ..report import reported, send_step
from .breakdown import MemoryBreakdown, StepTrace, WallClockBreakdown, host_gb, mean_milliseconds
from .clock import COMMUNICATION, DISK, PARTS, StepClock, TimedPart, TimedStep
from .flops_profiler import FlopsProfiler
from .trackers import Monitor, learning_rate

# -- step reporter ----------------------------------------------------------------------------------


_INTERVAL_S = 1.0
"""Seconds between two reports of rank 0, where the config's ``steps_per_print`` does not ask for more."""
_FIRST_INTERVAL_S = 0.1
"""Seconds between its reports in the first second."""
_OTHERS_INTERVAL_S = 2.0
_EVENTS_PER_S = 4.0
"""Reports a second from all ranks but the first, of however many there are."""
_MOST_STEPS = 1024
_MOST_STEPS_ON_GPU = 16
"""Steps whose times are kept for a report, the last ones; on a GPU each has events."""
_WAITS = (COMMUNICATION, DISK)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Says what a step costs and what this rank can reach, as far as it is known."""

    flops_per_token: int = 0
    """Counts the floating point operations of forward and backward pass for each token."""
    moved_bytes: Callable[[], float] = float
    """Returns the bytes that this rank's links have moved so far, as nccl-tests counts them for the bus."""
    disk_bytes: Callable[[], float] = float
    """Returns the bytes that this rank has read from and written to disks so far."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Holds what ``limits_of`` has found."""


@dataclass(frozen=True, slots=True)
class _Report:
    step: int
    names: tuple[str, ...]
    numbers: HostCopy
    known: dict[str, float]
    steps: tuple[TimedStep, ...]
    printed: bool


class StepReporter:
    """Reports every ``every``-th step of rank 0, to be printed; and under zlaunch others too, some seconds
    apart, of every rank. On a GPU a step is reported after the next one's end, so that nobody waits for it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        every: float | None,
        total_steps: Callable[[], dict[str, int]],
        on_gpu: bool,
        costs: StepCosts,
    ) -> None:
        """Report on ``engine``, in all ``every`` steps and at other times. ``total_steps`` returns what
        :func:`find_total_steps` does.
        """
        self._engine = engine
        self._total_steps = total_steps
        self.on_gpu = on_gpu
        reported.has_engine = True
        self._costs = costs
        self._moved = {"moved_mb": costs.moved_bytes(), "disk_mb": costs.disk_bytes()}
        self._sees_use = on_gpu
        first = engine.global_rank == 0
        self._every = int(every) if first and every and math.isfinite(every) else 0
        others = max(_OTHERS_INTERVAL_S, engine.world_size / _EVENTS_PER_S)
        self._interval_s = _INTERVAL_S if first else others
        self._timed = read_environment().event_fd is not None
        self._first_s = _FIRST_INTERVAL_S if first else self._interval_s / 2
        self._reported_at = -math.inf
        self._begun_at = self._measured_at = self._stepped_at = time.perf_counter()
        self._samples = engine.global_samples
        self._tokens = 0
        self._rows = self._flops = self._micro_tokens = 0
        self._steps: deque[TimedStep] = deque(maxlen=_MOST_STEPS_ON_GPU if on_gpu else _MOST_STEPS)
        self._has_begun = False
        self._failed = False
        self._counts_alike = True
        self._unreported = 0
        """Numbers the last step, while it has not been reported."""
        self._pending: _Report | None = None
        if self._timed or on_gpu:
            atexit.register(_finish, weakref.ref(self))

    def count_tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch: the elements of ``input_ids``, or of a first argument that is a
        tensor of int32 or int64 with at least two axes. Note its rows: those of the first tensor.
        """
        if not torch.is_grad_enabled() or not self._engine.training:
            return
        if not self._rows:  # known once for each report
            given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim())
            self._rows = next((each.size(0) for each in given), 0)  # nested tensors have a size(0), no shape
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.dim() >= 2 and ids.dtype in (torch.int32, torch.int64):
            # the last batch of an epoch may be smaller than the others
            self._micro_tokens = max(self._micro_tokens, ids.numel())
            self._tokens += ids.numel()

    def take_flops(self, operations: int) -> None:
        """Take the floating point operations of a micro-batch of this rank."""
        self._flops = operations

    def forget(self) -> None:
        """Begin to count anew, after a checkpoint was loaded."""
        self._steps.clear()
        self._measured_at = time.perf_counter()
        self._samples = self._engine.global_samples
        self._tokens = 0

    def after_step(self, step: TimedStep) -> None:
        """Take a step that has just been made, and report it if it is its turn. What fails is told once:
        training goes on.
        """
        self._guarded(lambda: self._after_step(step))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:
            self._failed = True
            self._pending = None
            fail(f"this rank no longer reports steps: {type(error).__name__}: {error}; training continues")

    def _after_step(self, step: TimedStep) -> None:
        self.flush()
        if reported.step is not None:  # a script may count micro-batches: then its count is shown
            self._counts_alike = abs(reported.step - step.number) <= 1
            reported.step = None
        if not self._has_begun:
            self._has_begun = True  # it has done much for the first time
        else:
            self._steps.append(step)
        now = self._stepped_at = time.perf_counter()
        printed = bool(self._every) and step.number % self._every == 0
        self._unreported = step.number
        # More often at first, so that a short run, or one that fails early, has been seen.
        interval_s = min(self._interval_s, max(self._first_s, (now - self._begun_at) / 10))
        if printed or (self._timed and now - self._reported_at >= interval_s):
            self._begin_report(step.number, now, printed=printed, more=self._speed(now))
            if not self.on_gpu:
                self.flush()

    def finish(self) -> None:
        """Report the last step, at the end of the process."""
        self._guarded(self._finish)

    def _finish(self) -> None:
        self.flush()
        if self._timed and self._unreported:
            at = self._stepped_at
            self._begin_report(self._unreported, at, printed=False, more=self._speed(at))
            self.flush()

    def _begin_report(self, step: int, now: float, *, printed: bool, more: dict[str, float]) -> None:
        metrics = {**learning_rate(self._engine.torch_optimizer), **self._engine.step_metrics()}
        numbers = HostCopy(list(metrics.values()))
        known = more | self._memory()
        self._reported_at = now
        self._unreported = 0
        self._pending = _Report(step, tuple(metrics), numbers, known, tuple(self._steps), printed)
        self._steps.clear()

    def flush(self) -> None:
        """Send the report that waits for its numbers, if there is one."""
        report = self._pending
        self._pending = None
        if report is None:
            return
        numbers = dict(zip(report.names, report.numbers.read(), strict=True))
        loss = {"loss": numbers.pop("train_loss")} if "train_loss" in numbers else {}
        steps = self._total_steps() if reported.steps is None else {"steps": reported.steps}
        values = {"step": report.step, **steps, **loss, **numbers, **report.known}
        hidden = reported.names if self._counts_alike else {*reported.names, "step", "steps", "of_epoch"}
        own = {name: value for name, value in values.items() if name not in hidden}
        split = self._split(report.steps)
        if split and own.get("mfu", 0.0) * split["all_ms"] > split["forward_ms"] + split["backward_ms"]:
            # The passes alone would exceed the peak: it was measured while others used the cores.
            del own["mfu"]
        send_step({"engine_step": report.step, **own, **split}, printed=report.printed)

    def _speed(self, now: float) -> dict[str, float]:
        seconds = max(now - self._measured_at, 1e-9)
        samples = self._engine.global_samples - self._samples
        steps = samples / self._engine.train_batch_size() if self._engine.train_batch_size() else 0.0
        found = {"samples_per_s": samples / seconds}
        flops = self._flops * self._engine.gradient_accumulation_steps() * steps
        if self._tokens:
            found["tokens_per_s"] = self._tokens * self._engine.data_parallel_size / seconds
            found["micro_tokens"] = self._micro_tokens
            flops = flops or self._tokens * self._costs.flops_per_token
        if self._rows:
            found["rows"] = self._rows
            self._rows = 0
        if flops:
            found["tflops"] = flops / seconds / 1e12
            share = found["tflops"] / self._costs.limits.get("matmul_tflops", math.inf)
            if 0 < share <= 1:  # more: the operations are not those that the formula counts
                found["mfu"] = share
        moved = {"moved_mb": self._costs.moved_bytes(), "disk_mb": self._costs.disk_bytes()}
        for name, nbytes in moved.items():
            if steps and nbytes > self._moved[name]:
                found[name] = (nbytes - self._moved[name]) / steps / 1e6
        self._moved = moved
        self._measured_at = now
        self._samples = self._engine.global_samples
        self._tokens = 0
        return found

    def _memory(self) -> dict[str, float]:
        """Return the GB (1e9 bytes) of this process in host memory and, the largest so far, on its device."""
        host = host_gb()
        device = torch.cuda.max_memory_allocated() / 1e9 if self.on_gpu else host
        return {"memory_gb": device, "host_gb": host, **self._use()}

    def _use(self) -> dict[str, float]:
        """Return the share of the last moments in which the GPU has computed; nothing without NVML."""
        if not self._sees_use:
            return {}
        try:
            return {"gpu_use": torch.cuda.utilization() / 100}
        except Exception:  # the package is missing, or the driver does not say it
            self._sees_use = False
            return {}

    def _split(self, steps: tuple[TimedStep, ...]) -> dict[str, float]:
        """Return milliseconds of a step: in each part but for its waits, in each kind of wait, in the script
        outside of the parts, and in all. Nothing after the first step.
        """
        if not steps:
            return {}
        means = mean_milliseconds(steps)
        found = {}
        for part in PARTS:
            waited = sum(means.get(f"{name} in {part}", 0.0) for name in _WAITS)
            found[f"{part}_ms"] = max(0.0, means.get(part, 0.0) - waited)
        found |= {f"{name}_ms": means.get(name, 0.0) for name in _WAITS}
        rest = max(0.0, means["all"] - sum(found.values()))
        return {**found, "script_ms": rest, "all_ms": means["all"], "timed_steps": len(steps)}


def _finish(reporter: weakref.ref[StepReporter]) -> None:
    alive = reporter()
    if alive is not None and (not alive.on_gpu or getattr(sys, "last_value", None) is None):
        alive.finish()  # after an error on a GPU the device may be lost


# -- total steps ------------------------------------------------------------------------------------
#
# Finds out how many steps a run makes, for its progress bar.


def find_total_steps(config: Config, engine: Engine) -> dict[str, int]:
    """Return ``steps``, how many the schedule counts. Where it says nothing, and `initialize` made the data
    loader, ``steps`` is the last one of an epoch, whose number is ``of_epoch``. Empty where neither says it.
    """
    params = config.scheduler.params if config.scheduler is not None else {}
    planned = _whole(params.get("total_num_steps")) or _of_schedule(engine.lr_scheduler)
    return {"steps": planned} if planned else _until_epoch_ends(engine)


def _of_schedule(scheduler: Any) -> int | None:
    """Return the steps of a schedule made by the script: `OneCycleLR`, or one of Hugging Face's, which the
    Trainer makes for its `max_steps`.
    """
    for function in getattr(scheduler, "lr_lambdas", None) or ():
        if isinstance(function, partial) and (found := _whole(function.keywords.get("num_training_steps"))):
            return found
    return _whole(getattr(scheduler, "total_steps", None))


def _until_epoch_ends(engine: Engine) -> dict[str, int]:
    loader = engine.training_dataloader
    if loader is None or not loader.taken:  # the script takes its batches from elsewhere, for now
        return {}
    left = loader.batches_left
    if left is None:  # a stream has no length
        return {}
    # From here on: earlier epochs may have been trained on other numbers of ranks, in other batches.
    more = (engine.accumulated + left) // engine.gradient_accumulation_steps()
    return {"steps": engine.global_steps + more, "of_epoch": loader.epoch} if left >= 0 else {}


def _whole(value: Any) -> int | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and math.isfinite(value) and value > 0 else None


# -- observation ------------------------------------------------------------------------------------
#
# Surrounds an engine's calls with what observes them: the clock, the reports, advice on memory.


_NOTHING: Mapping[str, Any] = {}
Around = Callable[..., AbstractContextManager[None]]
"""Gives a context for a call: its name, and of a forward pass the model's arguments."""


def open_monitor(effective: Effective, comm: Comm) -> Monitor:
    """Open the trackers. Raises MonitorError on every rank where rank 0 cannot."""
    monitor = None
    problem = None
    try:
        monitor = Monitor(effective.config, comm.rank)
    except MonitorError as error:
        problem = str(error)
    # Without a tracker there is nothing that could fail, and no need to ask the other ranks.
    problems = comm.exchange(problem) if monitor is None or monitor.enabled else []
    for rank, text in enumerate(problems):
        if text is not None:
            if monitor is not None:
                monitor.close()
            raise MonitorError(text if rank == comm.rank else f"on rank {rank}, {text}")
    assert monitor is not None
    return monitor


def observe(
    engine: Engine,
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
        self._where = name
        self._explain = explain
        self._overflow_hint = overflow_hint

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
