"""Stage 3."""

from zlaunch.compat.deepspeed.estimate import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zlaunch.compat.deepspeed.optimizers import ZeROOptimizer as DeepSpeedZeroOptimizer_Stage3
from zlaunch.compat.deepspeed.parameters import unwrap_model_for_generation
