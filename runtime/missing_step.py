"""Warns where a script makes backward passes and never calls ``step()``, so that nothing is trained.

Note [Missing step]. Several backward passes before a ``step()`` are legitimate: several losses, GANs,
scripts that accumulate themselves. Only an engine that has never been stepped is reported: after far more
passes than a step has, or, if there are fewer, when the engine or the process ends. Scripts that decide
about steps or gradients are not reported: those that call ``set_gradient_accumulation_boundary``
(Accelerate and the Hugging Face Trainer do before each pass) or ``no_sync``, that drop gradients between
passes, or that turn ``managed_gradient_accumulation`` off.
"""

from __future__ import annotations

import os
import sys

from .log import warn

_SURE_PASSES = 64
"""Backward passes that no script makes before its first step, unless gradient_accumulation_steps says so."""


class MissingStep:
    """Counts the backward passes of an engine that has not been stepped yet."""

    def __init__(self, *, is_watched: bool) -> None:
        self.is_watched = is_watched
        """Tells whether passes are to be noted: neither has the script stepped, nor has it been warned."""
        self._passes = 0
        self._accumulation = 1
        self._process = os.getpid()

    def trust(self) -> None:
        """Stop watching: the script steps, or decides about steps and gradients itself."""
        self.is_watched = False

    def note_backward(self, accumulation: int, *, is_first: bool) -> None:
        """Count a pass of a step of ``accumulation`` micro-batches; ``is_first``: there are no gradients yet,
        or the script has dropped them.
        """
        if is_first:
            self._passes = 0
        if self._passes >= max(_SURE_PASSES, 2 * accumulation):
            self._warn()
        self._passes += 1
        self._accumulation = accumulation

    def end(self) -> None:
        """Warn at the end of the engine or the process, unless an exception ends it."""
        has_failed = sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None
        is_fork = os.getpid() != self._process  # such as a worker of a DataLoader
        if self.is_watched and self._passes > self._accumulation and not (has_failed or is_fork):
            self._warn()
        self.is_watched = False

    def _warn(self) -> None:
        self.is_watched = False
        warn(
            f"engine.backward() was called {self._passes} times and engine.step() never, so nothing was "
            f"trained (gradient_accumulation_steps {self._accumulation}): call engine.step() after each "
            "engine.backward()"
        )
