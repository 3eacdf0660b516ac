"""Timers of a script's own parts."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.timers import (
    CudaEventTimer,
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
    trim_mean,
)

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"

__getattr__ = _absent("deepspeed.utils.timer")
