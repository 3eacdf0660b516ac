"""Remember a Ctrl-C whose KeyboardInterrupt Python has swallowed.

Python raises the exception in whatever code is running. In a finalizer or a weakref callback, it prints
"Exception ignored" with a traceback and continues: the Ctrl-C is lost. Imports run many weakref callbacks.
"""

from __future__ import annotations

import signal
import sys

_pressed = False


def remember_interrupts() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, and remember it."""
    global _pressed
    _pressed = False
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _report


def _interrupt(signum: int, frame: object) -> None:
    global _pressed
    _pressed = True
    raise KeyboardInterrupt


def _report(unraisable: sys.UnraisableHookArgs) -> None:
    """Print what Python cannot raise, but no Ctrl-C: it is remembered."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


def was_interrupted() -> bool:
    """Tell whether Ctrl-C has been pressed. A command that is still running has not seen it."""
    return _pressed
