"""Report what a Hugging Face Trainer logs: total steps, metrics of evaluations; without an engine, all of it.

Scripts pickle a Trainer with its callbacks, and pickle finds a class only by its name in a module. Importing
this module imports transformers, so it waits until the script has done so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import TrainerCallback

from zlaunch.runtime.report import report_logged

_OUR_NAMES = {"learning_rate": "lr"}
_SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of numbers that describe an evaluation, not the model."""
_NO_CURVES = ("epoch", "total_flos", "train_loss")
"""The last two are logged once, at the end."""
_PROGRESS = ("step", "steps")
"""The Trainer's state has them; a script may log others under these names."""


class MetricsCallback(TrainerCallback):
    """Reports to zlaunch."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report_logged({"steps": state.max_steps})

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        numbers = {
            _OUR_NAMES.get(name, name): value
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float))
            and name not in (*_NO_CURVES, *_PROGRESS)
            and not name.endswith(_SPEEDS)
        }
        if numbers:
            report_logged({"step": state.global_step, **numbers})
