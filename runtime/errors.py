"""Defines the runtime's errors, except those of the config and of checkpoints."""

from __future__ import annotations

from ..errors import ZlaunchError


class RankMismatchError(ZlaunchError, RuntimeError):
    """Reports that ranks differ in model, config or calls: training would hang or diverge."""


class ParameterError(ZlaunchError, RuntimeError):
    """Reports that a parameter was used or changed in a way that cannot reach the engine."""


class OptimizerError(ZlaunchError, RuntimeError, ValueError):
    """Reports that the optimizer was given, or asked for, something that an engine cannot do."""


class OffloadedError(ZlaunchError, RuntimeError):
    """Reports that a needed state is in host memory (``engine.offload_states``), or cannot be moved there."""


class DiskError(OSError, ZlaunchError):
    """Reports a failed transfer from or to a disk; the text names the file and what to do."""


class PeerLost(ZlaunchError, RuntimeError):
    """Reports that a rank of this machine has ended or stopped taking part, while this rank waits for it."""


class UnsupportedError(ZlaunchError, RuntimeError):
    """Reports that the script asks torch for something that an engine forbids; the text says what to do."""


class LossScaleFloorError(ZlaunchError, RuntimeError):
    """Reports gradients that overflow at the smallest loss scale: the model itself produces inf or NaN."""


class MemoryPlanError(ZlaunchError, RuntimeError):
    """Reports that the plan exceeds this machine's memory; the text names what is short and what fits."""


class MonitorError(ZlaunchError, RuntimeError):
    """Reports a tracker of metrics that cannot be opened, or an event that is none."""
