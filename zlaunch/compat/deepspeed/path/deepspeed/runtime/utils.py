"""Helpers that scripts call."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.tools import (
    clip_grad_norm_,
    move_to_device,
    required_torch_version,
    see_memory_usage,
    set_random_seed,
)

__getattr__ = _absent("deepspeed.runtime.utils")
