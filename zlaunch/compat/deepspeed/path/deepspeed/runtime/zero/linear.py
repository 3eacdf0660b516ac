"""Linear layers for stage 3."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.tools import LinearModuleForZeroStage3, zero3_linear_wrap

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]
__getattr__ = _absent("deepspeed.runtime.zero.linear")
