"""Knows whether a forward or backward pass of a model is going on, and in which thread."""

from __future__ import annotations

import itertools
import sys
from enum import IntEnum, auto
from types import FrameType

from . import placeholder

_began = itertools.count(1)
"""Numbers the passes of all models, so that the innermost of several is known."""


class Phase(IntEnum):
    """Says what a model is doing."""

    IDLE = auto()
    """Means that no pass is going on."""
    FORWARD = auto()
    """Means that the model is being called."""
    BACKWARD = auto()
    """Means that gradients are on their way, perhaps inside a call of the model (autograd.grad there)."""


_ALLOWED = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    Phase.FORWARD: {Phase.IDLE, Phase.BACKWARD},
    Phase.BACKWARD: {Phase.IDLE, Phase.FORWARD},
}
"""Lists the phases that may follow each."""


class Pass:
    """Tracks the passes of one model, also a forward pass that calls the model again."""

    def __init__(self, *, one_thread: bool) -> None:
        """Track no pass yet; with ``one_thread``, refuse that two threads use the model at a time."""
        self.phase = Phase.IDLE
        self.is_backward = False
        """Tells that a backward pass has begun and not ended. It is kept, because each gradient asks."""
        self.depth = 0
        """Counts the calls of the model that are going on, one inside the other."""
        self._one_thread = one_thread
        self._since = 0
        self._caller: FrameType | None = None

    def since(self) -> int:
        """Return the number of the pass that the calling code is part of; 0 if it is part of none, also after
        one that an exception has ended unnoticed.
        """
        if self.phase is Phase.BACKWARD:
            return self._since if placeholder.in_backward() else 0
        if self.phase is Phase.FORWARD and (self._caller is None or _is_above(self._caller, sys._getframe())):
            return self._since
        return 0

    def begin(self, hook: FrameType) -> None:
        """Note a call of the model; ``hook`` is the frame of its pre-hook."""
        if not self.depth:
            self._move(Phase.FORWARD)
            self._caller = _module_call(hook)
        self.depth += 1

    def end(self) -> None:
        """Note the end of a call."""
        if self.depth > 1:
            self.depth -= 1
        else:
            self.reset()

    def reset(self) -> None:
        """Note that no call is going on any more."""
        self.depth, self._caller = 0, None
        if self.phase is Phase.FORWARD:
            self._move(Phase.IDLE)

    def begin_backward(self) -> None:
        """Note the first gradient of a backward pass."""
        self._move(Phase.BACKWARD)

    def end_backward(self) -> None:
        """Note that the backward pass has ended, or that an exception has ended it."""
        self._move(Phase.FORWARD if self.depth else Phase.IDLE)

    def _move(self, to: Phase) -> None:
        assert to in _ALLOWED[self.phase], f"{self.phase.name} -> {to.name}"
        self.phase, self._since = to, next(_began)
        self.is_backward = to is Phase.BACKWARD

    def was_cut_off(self) -> bool:
        """Tell whether the pass has ended unnoticed: for an interrupt torch calls no hooks. Raises
        RuntimeError if another thread is in the model.
        """
        if not self.depth or self._caller is None or _is_above(self._caller, sys._getframe()):
            return False
        running = any(_is_above(self._caller, frame) for frame in sys._current_frames().values())
        if running and self._one_thread:
            raise RuntimeError(
                "another thread is calling this model: at stage 3, only one thread at a time can use a model"
            )
        return not running


def _module_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the module call that a hook is part of; it lives as long as the pass."""
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.modules.module":
        frame = frame.f_back
    return frame


def _is_above(wanted: FrameType | None, frame: FrameType | None) -> bool:
    """Tell whether ``wanted`` is on the stack that ends with ``frame``."""
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False
