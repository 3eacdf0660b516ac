"""Finds out how many steps a run makes, for its progress bar."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

from ..config import Config
from ..data import EngineLoader


class PlannedLoop(Protocol):
    """Has what may tell the length of a run."""

    training_dataloader: EngineLoader | None
    lr_scheduler: Any
    global_steps: int

    def gradient_accumulation_steps(self) -> int: ...


def find_total_steps(config: Config, loop: PlannedLoop) -> dict[str, int]:
    """Return ``steps``, how many the schedule counts. Where it says nothing, and `initialize` made the data
    loader, ``steps`` is the last one of an epoch, whose number is ``of_epoch``. Empty where neither says it.
    """
    params = config.scheduler.params if config.scheduler is not None else {}
    planned = _whole(params.get("total_num_steps")) or _of_schedule(loop.lr_scheduler)
    return {"steps": planned} if planned else _until_epoch_ends(loop)


def _of_schedule(scheduler: Any) -> int | None:
    """Return the steps of a schedule made by the script: `OneCycleLR`, or one of Hugging Face's, which the
    Trainer makes for its `max_steps`.
    """
    for function in getattr(scheduler, "lr_lambdas", None) or ():
        if isinstance(function, partial) and (found := _whole(function.keywords.get("num_training_steps"))):
            return found
    return _whole(getattr(scheduler, "total_steps", None))


def _until_epoch_ends(loop: PlannedLoop) -> dict[str, int]:
    loader = loop.training_dataloader
    if loader is None or not loader.epoch:
        return {}
    try:
        steps = len(loader) * loader.epoch // loop.gradient_accumulation_steps()
    except TypeError:  # a stream has no length
        return {}
    # another loader's steps, or those of a run that was resumed with other batches, are not counted here
    return {"steps": steps, "of_epoch": loader.epoch} if steps >= max(1, loop.global_steps) else {}


def _whole(value: Any) -> int | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and math.isfinite(value) and value > 0 else None
