"""Stages 1 and 2."""

from zlaunch.compat.deepspeed.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from zlaunch.compat.deepspeed.optimizers import ZeROOptimizer as DeepSpeedZeroOptimizer
