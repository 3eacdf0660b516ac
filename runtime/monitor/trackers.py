"""Writes events to TensorBoard, CSV files, Weights & Biases and Comet, each by its own library."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.monitors import Comet, FileMonitor, WandB

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

    section, package, module = "tensorboard", "tensorboard", "tensorboard"

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

    section, package, module = "wandb", "wandb>=0.19.10", "wandb"

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

    section, package, module = "comet", "comet_ml", "comet_ml"

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
