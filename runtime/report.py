"""Reports the metrics of a step to the launcher."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any, Protocol

from torch import Tensor

from .environment import read_environment
from .log import show


def report(**values: float | int | None) -> None:
    """Tell the launcher (or, without one, standard error of rank 0) the metrics of a step.

    Known names are shown by name (``step``, ``steps``, ``loss``, ``lr``, ``loss_scale``, ``grad_norm``,
    ``tokens_per_s``, ``memory_gb``); others are passed along. Never raises: a closed pipe must not end a run.
    Under zlaunch every rank may report; the console shows rank 0 and the memory of all.
    """
    environment = read_environment()
    shown = {name: value for name, value in values.items() if value is not None}
    if environment.event_fd is None:
        if environment.rank == 0:
            show(" ".join(f"{k} {v:.6g}" for k, v in shown.items()), sys.stderr)
        return
    announce("metrics", values=shown)


class ReportedLoop(Protocol):
    """Has the metrics of its last step."""

    last_loss: Tensor | None
    global_steps: int
    global_samples: int

    @property
    def loss_scale(self) -> float: ...
    def get_lr(self) -> list[float]: ...
    def get_global_grad_norm(self) -> float | None: ...


class StepReporter:
    """Reports the metrics of every ``every``-th step, with the speed since the last report."""

    def __init__(self, every: float | None) -> None:
        self._every = int(every) if every and math.isfinite(every) else 0
        self._time, self._samples = time.perf_counter(), 0

    def after_step(self, loop: ReportedLoop) -> None:
        """Report the step that has just been made, if it is its turn; on a GPU that waits for the step."""
        if not self._every or loop.global_steps % self._every:
            return
        now, samples = time.perf_counter(), loop.global_samples
        seconds = max(now - self._time, 1e-9)
        speed = (samples - self._samples) / seconds
        self._time, self._samples = now, samples
        report(
            step=loop.global_steps,
            loss=float(loop.last_loss) if loop.last_loss is not None else None,
            lr=next(iter(loop.get_lr()), None),
            loss_scale=loop.loss_scale,
            grad_norm=loop.get_global_grad_norm(),
            samples_per_s=speed,
        )


def announce(kind: str, **content: Any) -> None:
    """Tell the launcher, if there is one, about an event. Never raises."""
    environment = read_environment()
    if environment.event_fd is None:
        return
    event = {"type": kind, "rank": environment.rank, "time": time.time(), **content}
    try:
        os.write(environment.event_fd, json.dumps(event).encode() + b"\n")
    except (OSError, ValueError):
        pass
