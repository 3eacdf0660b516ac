"""The module in which DeepSpeed has it."""

from zlaunch.compat.deepspeed.accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
