"""Errors that several rooms of the runtime raise."""

from __future__ import annotations


class ZlaunchError(RuntimeError):
    """Base of the runtime's errors."""


class RankMismatchError(ZlaunchError):
    """The ranks differ in model, config or in the calls they make; training would hang or diverge."""


class ParameterError(ZlaunchError):
    """A parameter was used or changed in a way that cannot reach the engine."""


class OptimizerError(ZlaunchError, ValueError):
    """The optimizer was given, or asked for, something that an engine cannot do."""


class OffloadedError(ZlaunchError):
    """A state was needed that ``engine.offload_states`` has moved to host memory, or that it cannot move."""


class DiskError(OSError, ZlaunchError):
    """A transfer from or to a disk did not happen as asked; the text names the file and what to do."""
