"""Add zlaunch's callback to a Hugging Face Trainer.

The Trainer adds its default callbacks to those of the script. One more among them needs no change in scripts.
"""

from __future__ import annotations

from types import ModuleType

from zlaunch.system.import_watch import when_imported


def watch() -> None:
    """Add the callback as soon as the script imports the Trainer."""
    when_imported("transformers.trainer", _add_callback)


def _add_callback(module: ModuleType) -> None:
    from zlaunch.compat.trainer_callback import MetricsCallback

    module.DEFAULT_CALLBACKS.append(MetricsCallback)
