"""The config sections that switch trackers on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .field_types import Bool, Count, Section, ok


class FileMonitor(Section):
    """Metrics as TensorBoard or CSV files."""

    enabled: Bool = ok(False)
    """Write the metrics of every step."""
    output_path: str = ok("")
    """Parent folder of job_name; empty: the working directory."""
    job_name: str = ok("DeepSpeedJobName")
    """Folder of the files, inside output_path."""


class WandB(Section):
    """Metrics for Weights & Biases."""

    enabled: Bool = ok(False)
    """Log the metrics of every step to a run separate from the script's."""
    group: str | None = ok(None)
    """Run group."""
    team: str | None = ok(None)
    """Team or user."""
    project: str = ok("deepspeed")
    """Project."""


class Comet(Section):
    """Metrics for Comet."""

    enabled: Bool = ok(False)
    """Log the metrics."""
    samples_log_interval: Count = ok(100)
    """Samples between two values of a metric."""
    project: str | None = ok(None)
    """Project."""
    workspace: str | None = ok(None)
    """Workspace."""
    api_key: str | None = ok(None)
    """API key; prefer the environment variable COMET_API_KEY."""
    experiment_name: str | None = ok(None)
    """Experiment name."""
    experiment_key: str | None = ok(None)
    """Experiment key."""
    online: Bool | None = ok(None)
    """Upload during the run; false writes an archive to upload later."""
    mode: Literal["get", "create", "get_or_create"] | None = ok(None)
    """Create an experiment or continue an existing one."""


TRACKERS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Names the sections."""


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config as plain values, its API key left out."""
    comet = config.get("comet")
    if not isinstance(comet, Mapping) or comet.get("api_key") is None:
        return dict(config)
    return {**config, "comet": {**comet, "api_key": "(left out)"}}
