"""The error of ZeRO."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.optimizers import ZeRORuntimeException

__getattr__ = _absent("deepspeed.runtime.zero.utils")
