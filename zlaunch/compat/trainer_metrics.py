"""Report what a Hugging Face Trainer logs: total steps, metrics of evaluations; without an engine, all of it.

The Trainer adds its default callbacks to those of the script. One more among them needs no change in scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from zlaunch.node.import_watch import when_imported

_OUR_NAMES = {"learning_rate": "lr"}
_SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of numbers that describe an evaluation, not the model."""
_NO_CURVES = ("epoch", "total_flos", "train_loss")
"""The last two are logged once, at the end."""


def watch() -> None:
    """Add the callback as soon as the script imports the Trainer."""
    when_imported("transformers.trainer", _add_callback)


def _add_callback(module: ModuleType) -> None:
    from zlaunch.runtime.report import report_logged

    module.DEFAULT_CALLBACKS.append(_callback_class(module.TrainerCallback, report_logged))


def _callback_class(base: type, send: Callable[[Mapping[str, float]], None]) -> type:
    class MetricsCallback(base):  # type: ignore[misc]
        """Reports to zlaunch."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            send({"steps": state.max_steps})

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
        ) -> None:
            numbers = {
                _OUR_NAMES.get(name, name): value
                for name, value in (logs or {}).items()
                if isinstance(value, (int, float)) and name not in _NO_CURVES and not name.endswith(_SPEEDS)
            }
            if numbers:
                send({"step": state.global_step, **numbers})

    return MetricsCallback
