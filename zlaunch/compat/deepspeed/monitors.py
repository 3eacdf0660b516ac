"""``deepspeed.monitor``: trackers without an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zlaunch.runtime.config import load
from zlaunch.runtime.config.monitors import TRACKERS, Comet, FileMonitor, WandB
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.monitor import monitor


class DeepSpeedMonitorConfig:
    """Holds the sections of the trackers; DeepSpeed's name for it.

    Attributes
        tensorboard, wandb, csv_monitor, comet: the sections, with their defaults.
        enabled: one of them is switched on.
        whole: a Config with these sections.
    """

    tensorboard: FileMonitor
    wandb: WandB
    csv_monitor: FileMonitor
    comet: Comet

    def __init__(self, **sections: Mapping[str, Any]) -> None:
        """Read sections by name. Raises ConfigError."""
        config = load({name: dict(section) for name, section in sections.items()}).config
        for name in TRACKERS:
            setattr(self, name, getattr(config, name))
        self.whole = config
        self.enabled = any(getattr(config, name).enabled for name in TRACKERS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the sections of the trackers in a config dict; other keys are not looked at."""
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in TRACKERS if name in param_dict})


class Monitor(ABC):
    """Is DeepSpeed's base class for what writes events."""

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Sequence[Any]]) -> None:
        """Write ``(name, value, step)``."""


class MonitorMaster(Monitor):
    """Writes events to every tracker of a config, on rank 0."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        """Open the trackers. Raises MonitorError."""
        super().__init__(monitor_config)
        rank = dist.get_rank() if dist.is_initialized() else read_environment().rank
        self._monitor = monitor.Monitor(monitor_config.whole, rank)
        self.enabled = self._monitor.enabled

    def write_events(self, event_list: Iterable[Sequence[Any]]) -> None:
        """Write ``(name, value, step)``. Raises MonitorError where an event is something else."""
        self._monitor.write_events(event_list)
