"""Where DeepSpeed-Chat finds two helpers."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.tools import recursive_getattr, recursive_setattr

__getattr__ = _absent("deepspeed.compression.helper")
