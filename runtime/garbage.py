"""Keeps Python's garbage collections out of steps: ``disable_python_gc``.

A collection stops one rank for tens of milliseconds, and all others wait for it in the next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import finalize

_held = 0
_was_enabled = False


def hold_back_collections(owner: object) -> Callable[[], object]:
    """Collect garbage now, and then only when ``gc.collect()`` is called, while ``owner`` is alive. Return
    what ends that earlier; automatic collections go on when the last owner is gone, if they were on before.
    """
    global _held, _was_enabled
    if _held == 0:
        _was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
    _held += 1
    return finalize(owner, _release)


def _release() -> None:
    global _held
    _held -= 1
    if _held == 0 and _was_enabled:
        gc.enable()
