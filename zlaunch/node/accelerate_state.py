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
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


def watch() -> None:
    """Adapt accelerate now, or as soon as it is imported. Without effect in a run of one worker."""
    if not _is_one_of_several():
        return
    if (loaded := sys.modules.get(_MODULE)) is not None:
        _adapt(loaded)
    else:
        sys.meta_path.insert(0, _Watch())


def _is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "LOCAL_RANK" in os.environ


class _Watch:
    """Adapts the module when it is imported, and is gone then."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_adapt(module: ModuleType) -> None:
                run(module)
                _adapt(module)

            spec.loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec


def _adapt(module: ModuleType) -> None:
    """Give the first state what it needs, and raise where it still does not see the other workers."""
    kind: Any = module.PartialState
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **options: Any) -> None:
        is_first = _is_one_of_several() and not kind._shared_state
        if is_first and not cpu and self.default_device.type in ("cpu", "mps"):
            if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
                cpu = True
            elif options.get("backend") is None:
                options["backend"] = "gloo"
        original(self, cpu, **options)
        if is_first and self.num_processes == 1:
            world = os.environ["WORLD_SIZE"]
            kind._reset_state()
            raise RuntimeError(
                f"accelerate treats this worker as a separate run, but it is one of {world}: each would "
                "train on all of the data. For CPU workers make the Accelerator with cpu=True, or beside "
                'DeepSpeed\'s plugin with kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]; or '
                "start one worker"
            )

    kind.__init__ = init
