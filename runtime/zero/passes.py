"""Knows whether a forward pass of a model is going on, and in which thread."""

from __future__ import annotations

import sys
from types import FrameType


class Pass:
    """Tracks the forward pass of one model, also one that calls the model again."""

    def __init__(self, *, one_thread: bool) -> None:
        """Track no pass yet; with ``one_thread``, refuse that two threads use the model at a time."""
        self.depth = 0
        """Counts the calls of the model that are going on, one inside the other."""
        self._one_thread = one_thread
        self._caller: FrameType | None = None

    def begin(self, hook: FrameType) -> None:
        """Note a call of the model; ``hook`` is the frame of its pre-hook."""
        if not self.depth:
            self._caller = _module_call(hook)
        self.depth += 1

    def end(self) -> None:
        """Note the end of a call."""
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            self._caller = None

    def reset(self) -> None:
        """Note that no call is going on any more."""
        self.depth, self._caller = 0, None

    def was_cut_off(self) -> bool:
        """Tell whether the pass has ended unnoticed: for an interrupt torch calls no hooks. Raises
        RuntimeError if another thread is in the model.
        """
        if not self.depth or self._caller is None or _is_above(self._caller, sys._getframe()):
            return False
        running = any(_is_above(self._caller, frame) for frame in sys._current_frames().values())
        if running and self._one_thread:
            raise RuntimeError(
                "this model is being called by another thread: at stage 3, where parameters come and go, "
                "only one thread at a time can use it"
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
