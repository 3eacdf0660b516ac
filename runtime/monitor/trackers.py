"""Writes events to TensorBoard, CSV files, Weights & Biases and Comet, each by its own library."""

from __future__ import annotations

import csv
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.monitors import Comet, FileMonitor, WandB

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

    def write(self, events: Sequence[Event]) -> None:
        """Append a line for each event; a file that is empty gets a line with the columns first."""
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                lines = csv.writer(file)
                if file.tell() == 0:
                    lines.writerow(["step", name.rpartition("/")[2]])
                lines.writerow([step, value])


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
    """Logs to a run of Weights & Biases: the script's, if it has begun one, else one of its own.

    In its own run, wandb's step is the event's. The script's run has steps of the script's, and wandb drops
    what comes for an earlier one: there the event's step is a metric, ``zlaunch/step``.
    """

    section, package, module = "wandb", "wandb", "wandb"

    def __init__(self, config: WandB) -> None:
        import wandb

        self._wandb: Any = wandb
        self._own = wandb.run is None
        if self._own:
            wandb.init(project=config.project, group=config.group, entity=config.team)
        else:
            wandb.define_metric("Train/Samples/*", step_metric="zlaunch/step")

    def write(self, events: Sequence[Event]) -> None:
        """Log events that belong to one step at once."""
        by_step: dict[int, dict[str, float]] = {}
        for name, value, step in events:
            by_step.setdefault(step, {})[name] = value
        for step, values in by_step.items():
            if self._own:
                self._wandb.log(values, step=step)
            else:
                self._wandb.log({**values, "zlaunch/step": step})

    def close(self) -> None:
        """End the run, if it is not the script's."""
        if self._own:
            self._wandb.finish()


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
        """Log the events that are at least ``samples_log_interval`` behind the last of their name."""
        for name, value, step in events:
            if name in self._last and step - self._last[name] < self._interval:
                continue
            self._last[name] = step
            self._experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        """Send what is left and end the experiment."""
        self._experiment.end()
