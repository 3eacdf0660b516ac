"""Adapt a module of another package when the script imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, adapt: Callable[[ModuleType], None]) -> None:
    """Call `adapt` with the module now, or as soon as it has been imported."""
    if (loaded := sys.modules.get(name)) is not None:
        adapt(loaded)
    else:
        sys.meta_path.insert(0, _Watch(name, adapt))


class _Watch:
    """Adapts the module when it is imported, and is gone then."""

    def __init__(self, name: str, adapt: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._adapt = adapt

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_adapt(module: ModuleType) -> None:
                run(module)
                self._adapt(module)

            spec.loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec
