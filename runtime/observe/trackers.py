"""Writes events to TensorBoard, CSV files, Weights & Biases and Comet, each by its own library."""

from __future__ import annotations

import atexit
import csv
import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..config.fields import Section
from ..config.schema import Comet, FileMonitor, WandB
from ..device import HostCopy
from ..engine import Engine
from ..errors import MonitorError
from ..log import fail

# -- trackers ---------------------------------------------------------------------------------------


_MOST_NAME_BYTES = 200
Event = tuple[str, float, int]
"""Names a metric, ``/`` between its parts, and gives its value and its place on the x axis."""


class Tracker(ABC):
    """Keeps events somewhere."""

    section: str
    """Names the config section that switches it on."""
    package: str | None = None
    """Names the package that it needs, as pip knows it."""
    module: str | None = None
    """Names the module of that package."""

    @classmethod
    def find_missing(cls) -> str | None:
        """Say what has to be installed; None where all is there."""
        if cls.module is None:
            return None
        spec = importlib.util.find_spec(cls.module)
        if spec is not None and spec.origin is not None:  # a mere folder, such as ./wandb, has none
            return None
        return f"{cls.section}: needs the package {cls.package}: pip install {cls.package}"

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None:
        """Write events, so that another process can read them soon."""

    def close(self) -> None:
        """Write what is left."""


class CsvFiles(Tracker):
    """Appends to a file for each metric, with the columns ``step`` and the last part of its name."""

    section = "csv_monitor"

    def __init__(self, config: FileMonitor) -> None:
        self._folder = Path(config.output_path) / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._names: dict[str, str] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Append a line for each event; a file that is empty gets a line with the columns first."""
        for name, value, step in events:
            with self._path(name).open("a", newline="", encoding="utf-8") as file:
                lines = csv.writer(file)
                if file.tell() == 0:
                    lines.writerow(["step", name.rpartition("/")[2]])
                lines.writerow([step, value])

    def _path(self, name: str) -> Path:
        """Return a metric's file; a name that is too long, or whose file has another metric, gets a hash."""
        stem = name.replace("/", "_").replace(" ", "_")
        if len(stem.encode()) > _MOST_NAME_BYTES or self._names.setdefault(stem, name) != name:
            mark = hashlib.sha256(name.encode()).hexdigest()[:8]
            stem = f"{stem.encode()[:_MOST_NAME_BYTES].decode(errors='ignore')}-{mark}"
        return self._folder / f"{stem}.csv"


class TensorBoard(Tracker):
    """Writes event files that TensorBoard reads."""

    section = "tensorboard"
    package = "tensorboard"
    module = "tensorboard"

    def __init__(self, config: FileMonitor) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(Path(config.output_path) / config.job_name)
        self._writer: Any = SummaryWriter(log_dir=folder)

    def write(self, events: Sequence[Event]) -> None:
        """Add scalars."""
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Logs to a run of Weights & Biases of its own, beside any run of the script's, which stays as it is.

    It begins with the first events: wandb would hand a run that is there to a script that begins its own.
    The x axis is the metric ``step``: wandb's own step only rises, and drops what comes for an earlier one.
    """

    section = "wandb"
    package = "wandb>=0.19.10"
    module = "wandb"

    def __init__(self, config: WandB) -> None:
        self._config = config
        self._run: Any = None

    def write(self, events: Sequence[Event]) -> None:
        """Log events that belong to one step at once."""
        import wandb

        if self._run is None:
            config = self._config
            self._run = wandb.init(
                project=config.project, group=config.group, entity=config.team, reinit="create_new"
            )
            self._run.define_metric("*", step_metric="step")
        by_step: dict[int, dict[str, float]] = {}
        for name, value, step in events:
            by_step.setdefault(step, {})[name] = value
        for step, values in by_step.items():
            self._run.log({**values, "step": step})

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


class CometExperiment(Tracker):
    """Logs to an experiment of Comet; of each metric, the values that are far enough apart."""

    section = "comet"
    package = "comet_ml"
    module = "comet_ml"

    def __init__(self, config: Comet) -> None:
        import comet_ml

        self._interval = config.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment: Any = comet_ml.start(
            api_key=config.api_key,
            workspace=config.workspace,
            project=config.project,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)

    def write(self, events: Sequence[Event]) -> None:
        """Log the events that are at least ``samples_log_interval`` away from the last of their name."""
        for name, value, step in events:
            if name in self._last and abs(step - self._last[name]) < self._interval:
                continue
            self._last[name] = step
            self._experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        """Send what is left and end the experiment."""
        self._experiment.end()


# -- monitor ----------------------------------------------------------------------------------------
#
# Writes the metrics of a run's steps, and what its script adds, to every tracker.


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

    def after_step(self, engine: Engine) -> None:
        """Write the metrics of the step that has just been made; see :meth:`expect`."""
        if self._trackers:
            metrics = {**learning_rate(engine.torch_optimizer), **engine.step_metrics()}
            samples = engine.global_samples
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
