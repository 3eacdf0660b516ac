"""The runtime's errors. Those of the config and of checkpoints are in their rooms."""

from __future__ import annotations

from ..errors import ZlaunchError


class RankMismatchError(ZlaunchError, RuntimeError):
    """The ranks differ in model, config or in the calls they make; training would hang or diverge."""


class ParameterError(ZlaunchError, RuntimeError):
    """A parameter was used or changed in a way that cannot reach the engine."""


class OptimizerError(ZlaunchError, RuntimeError, ValueError):
    """The optimizer was given, or asked for, something that an engine cannot do."""


class OffloadedError(ZlaunchError, RuntimeError):
    """A state was needed that ``engine.offload_states`` has moved to host memory, or that it cannot move."""


class DiskError(OSError, ZlaunchError):
    """A transfer from or to a disk did not happen as asked; the text names the file and what to do."""


class PeerLost(ZlaunchError, RuntimeError):
    """A rank of this machine has ended, or stopped taking part, while this one needs something of it."""


class UnsupportedError(ZlaunchError, RuntimeError):
    """The script asks torch for something that does not work with this engine; the text says what to do."""


class LossScaleFloorError(ZlaunchError, RuntimeError):
    """Gradients overflow although the loss scale is at its minimum: the model itself produces inf or NaN."""


class MemoryPlanError(ZlaunchError, RuntimeError):
    """The plan does not fit into this machine's memory; the text names what is short and what would fit."""
