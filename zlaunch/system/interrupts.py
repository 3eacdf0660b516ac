"""Remember a Ctrl-C whose KeyboardInterrupt Python has swallowed.

Python raises the exception in whatever runs at that moment. In a finalizer or a weakref's callback, of which
an import makes many, it is printed as "Exception ignored", and the command goes on as if nothing had been
pressed.
"""

from __future__ import annotations

import signal

_pressed = False


def remember_interrupts() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, and remember it."""
    global _pressed
    _pressed = False
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(signum: int, frame: object) -> None:
    global _pressed
    _pressed = True
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Tell whether Ctrl-C has been pressed. A command that is still running has not seen it."""
    return _pressed
