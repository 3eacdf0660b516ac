"""Defines the runtime's errors, except those of the config and of checkpoints."""

from __future__ import annotations

from ..errors import ZlaunchError


class RankMismatchError(ZlaunchError, RuntimeError):
    """Ranks differ in model, config or calls, so training would hang or diverge."""


class ParameterError(ZlaunchError, RuntimeError):
    """A parameter was used or changed in a way that the engine does not support."""


class OptimizerError(ZlaunchError, RuntimeError, ValueError):
    """The engine does not support the optimizer or a call on it."""


class OffloadedError(ZlaunchError, RuntimeError):
    """A required state is in host memory (``engine.offload_states``), or cannot be moved there."""


class DiskError(OSError, ZlaunchError):
    """A transfer from or to a disk failed; the message names the file and what to do."""


class PeerLost(ZlaunchError, RuntimeError):
    """Another rank of this machine exited or stopped communicating while this rank waits for it."""


class UnsupportedError(ZlaunchError, RuntimeError):
    """The script uses a torch feature that the engine does not support; the message says what to do."""


class LossScaleFloorError(ZlaunchError, RuntimeError):
    """Gradients overflow at the minimum loss scale: the model itself produces inf or NaN."""


class MemoryPlanError(ZlaunchError, RuntimeError):
    """The memory plan exceeds this machine's memory; the message names what is short and what fits."""


class MonitorError(ZlaunchError, RuntimeError):
    """A metrics tracker cannot be opened, or an event is invalid."""
