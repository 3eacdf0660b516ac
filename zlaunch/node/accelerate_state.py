"""Tell accelerate that CPU workers are one run.

Note [Accelerate on CPU workers]. accelerate finds the other processes of a run by their accelerator. On the
CPU it needs to be told: otherwise every worker is process 0 of 1, trains on all of the data and saves, and
the run exits with 0. ``ACCELERATE_USE_CPU`` in the environment would tell it, but switches DeepSpeed's plugin
off, and whether a script has one shows only when it makes its ``Accelerator``. So the moment to decide is the
first ``PartialState``, which both ``Accelerator`` and the Trainer make: it takes ``cpu=True``, or with the
plugin the backend's name.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from zlaunch.system.import_watch import when_imported


def watch() -> None:
    """Adapt accelerate now, or as soon as it is imported. Without effect in a run of one worker."""
    if _is_one_of_several():
        when_imported("accelerate.state", _adapt)


def _is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "LOCAL_RANK" in os.environ


def _adapt(module: ModuleType) -> None:
    """Give the first state what it needs, and raise where it still does not see the other workers."""
    kind: Any = module.PartialState
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **options: Any) -> None:
        # All PartialStates share one state, so the first one decides.
        is_first = _is_one_of_several() and not kind._shared_state
        if is_first and not cpu and self.default_device.type in ("cpu", "mps"):
            if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
                cpu = True
            elif options.get("backend") is None:
                options["backend"] = "gloo"
        original(self, cpu, **options)
        if is_first and self.num_processes == 1:
            world = os.environ["WORLD_SIZE"]
            # A script that catches the error would otherwise get the wrong state from the next one, without
            # this check.
            kind._reset_state()
            raise RuntimeError(
                f"accelerate treats this worker as a separate run, but it is one of {world}: each would "
                "train on all of the data. For CPU workers make the Accelerator with cpu=True, or beside "
                'DeepSpeed\'s plugin with kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]; or '
                "start one worker"
            )

    kind.__init__ = init
