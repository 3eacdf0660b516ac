"""Writes the metrics of a run's steps, and what its script adds, to every tracker."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import Config
from ..config.field_types import Section
from ..errors import MonitorError
from ..host_copy import HostCopy
from ..log import fail
from .trackers import CometExperiment, CsvFiles, Event, TensorBoard, Tracker, WeightsAndBiases


class MonitoredLoop(Protocol):
    """Has the metrics of its last step, on the device where they are there."""

    global_samples: int

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None: ...
    def step_metrics(self) -> dict[str, float | Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Expected:
    step: int
    is_here: bool
    read: Callable[[], Sequence[Event]]


class Monitor:
    """Writes events to the trackers that the config switches on. It does so on rank 0; on other ranks its
    methods do nothing.

    Attributes
        enabled: the config switches on a tracker; equal on all ranks.
    """

    def __init__(self, config: Config, rank: int) -> None:
        """Open the trackers. Raises MonitorError: on every rank where a package is missing, on rank 0 where a
        tracker cannot be opened.
        """
        chosen = _chosen(config)
        self.enabled = bool(chosen)
        missing = [text for kind, _ in chosen if (text := kind.find_missing())]
        if missing:
            raise MonitorError("; ".join(missing))
        self._trackers: list[Tracker] = []
        self._failed: set[Tracker] = set()
        self._closed = False
        self._expected: deque[_Expected] = deque()
        if rank != 0:
            return
        for kind, section in chosen:
            try:
                self._trackers.append(kind(section))
            except Exception as error:  # each library has errors of its own
                self.close()
                raise MonitorError(f"{kind.section}: {type(error).__name__}: {error}") from error
        if self._trackers:
            atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Return whether this rank writes events."""
        return bool(self._trackers)

    def write_events(self, event_list: Iterable[Sequence[Any]]) -> None:
        """Write events ``(name, value, step)``; a value is a number or a tensor with one element.

        If a tracker fails, print one warning and continue. Raises MonitorError for malformed events, and
        after :meth:`close`.
        """
        if self._closed and self.enabled:
            raise MonitorError("the trackers are closed, because their engine was destroyed")
        if self._trackers:
            self._write([_checked(event) for event in event_list])

    def after_step(self, loop: MonitoredLoop) -> None:
        """Write the metrics of the step that has just been made; see :meth:`expect`."""
        if self._trackers:
            metrics = {**learning_rate(loop.torch_optimizer), **loop.step_metrics()}
            samples = loop.global_samples
            numbers = HostCopy(list(metrics.values()))
            names = [f"Train/Samples/{name}" for name in metrics]

            def read() -> list[Event]:
                return [(name, value, samples) for name, value in zip(names, numbers.read(), strict=True)]

            self.expect(samples, numbers.is_done, read)

    def expect(self, step: int, is_here: bool, read: Callable[[], Sequence[Event]]) -> None:
        """Write what ``read`` returns: now if it ``is_here``, else once that of a later step is expected, so
        that nobody waits for the device.
        """
        if not self._trackers:
            return
        self._expected.append(_Expected(step, is_here, read))
        while self._expected and (self._expected[0].step != step or self._expected[0].is_here):
            self._write(self._expected.popleft().read())

    def _write(self, events: Sequence[Event]) -> None:
        for tracker in self._trackers:
            try:
                tracker.write(events)
            except Exception as error:
                if tracker not in self._failed:
                    self._failed.add(tracker)
                    fail(
                        f"{tracker.section}: {type(error).__name__}: {error}; its metrics are lost, "
                        "training continues"
                    )

    def close(self) -> None:
        """Write what is still expected and close the trackers. A second call does nothing."""
        atexit.unregister(self.close)
        self._closed = True
        try:
            while self._expected:
                self._write(self._expected.popleft().read())
        finally:
            for tracker in self._trackers:
                try:
                    tracker.close()
                except Exception as error:
                    fail(f"{tracker.section}: {type(error).__name__}: {error}")
            self._trackers = []


def _chosen(config: Config) -> list[tuple[type[Any], Section]]:
    """Return the trackers that are switched on, each with its section."""
    known = (
        (config.tensorboard.enabled, TensorBoard, config.tensorboard),
        (config.wandb.enabled, WeightsAndBiases, config.wandb),
        (config.csv_monitor.enabled, CsvFiles, config.csv_monitor),
        (config.comet.enabled, CometExperiment, config.comet),
    )
    return [(kind, section) for enabled, kind, section in known if enabled]


def learning_rate(optimizer: torch.optim.Optimizer | None) -> dict[str, float | Tensor]:
    """Return the first group's rate; nothing where it is no number, as with Adafactor's own schedule."""
    rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
    return {"lr": rate} if isinstance(rate, (int, float, Tensor)) else {}


def _checked(event: Sequence[Any]) -> Event:
    try:
        name, value, step = event
        if isinstance(name, str) and "\0" not in name:
            return name, float(value), int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's: a tensor of several elements
        pass
    raise MonitorError(f"expected an event (name, number, step), not {event!r}")
