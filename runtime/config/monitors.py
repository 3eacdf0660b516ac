"""The config sections that switch trackers on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .field_types import Bool, Count, Section, ok


class FileMonitor(Section):
    """Metrics in files: TensorBoard's or CSV."""

    enabled: Bool = ok(False)
    """Write the metrics of every step."""
    output_path: str = ok("")
    """Folder, by default the working directory; the files are in a folder job_name in it."""
    job_name: str = ok("DeepSpeedJobName")
    """Name of that folder."""


class WandB(Section):
    """Metrics for Weights & Biases."""

    enabled: Bool = ok(False)
    """Log the metrics of every step, to a run of its own beside any run of the script's."""
    group: str | None = ok(None)
    """Group of runs."""
    team: str | None = ok(None)
    """Team or user."""
    project: str = ok("deepspeed")
    """Project."""


class Comet(Section):
    """Metrics for Comet."""

    enabled: Bool = ok(False)
    """Log the metrics."""
    samples_log_interval: Count = ok(100)
    """Samples between two records of a metric."""
    project: str | None = ok(None)
    """Project."""
    workspace: str | None = ok(None)
    """Workspace."""
    api_key: str | None = ok(None)
    """API key; better kept in the environment, as COMET_API_KEY."""
    experiment_name: str | None = ok(None)
    """Name of the experiment."""
    experiment_key: str | None = ok(None)
    """Key of the experiment."""
    online: Bool | None = ok(None)
    """Send while running; false writes an archive to upload later."""
    mode: Literal["get", "create", "get_or_create"] | None = ok(None)
    """Create the experiment or go on with one."""


TRACKERS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Names the sections."""


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config as plain values, its API key left out."""
    comet = config.get("comet")
    if not isinstance(comet, Mapping) or comet.get("api_key") is None:
        return dict(config)
    return {**config, "comet": {**comet, "api_key": "(left out)"}}
