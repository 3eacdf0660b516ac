"""Let Lightning end a run over an optimizer whose state is lost with its engine.

Lightning's teardown moves each entry of ``optimizer.state`` to the CPU, also of the optimizer that ``fit``
has left. Where ``test`` has made another engine of the model, that optimizer's state is lost, and raises.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from zlaunch.system.import_watch import when_imported


def watch() -> None:
    """Adapt Lightning now, or as soon as it is imported, under both of its names."""
    for package in ("lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.utilities.optimizer", _adapt)


def _adapt(module: ModuleType) -> None:
    from zlaunch.runtime.script.optimizer import has_lost_state

    move = getattr(module, "_optimizer_to_device", None)
    if move is None:  # another version
        return

    @functools.wraps(move)
    def move_what_is_there(optimizer: Any, device: Any) -> None:
        if not has_lost_state(optimizer):
            move(optimizer, device)

    module._optimizer_to_device = move_what_is_there  # type: ignore[attr-defined]
