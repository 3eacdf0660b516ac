"""Attention over sequences of which each rank has a part."""

from zlaunch.compat.deepspeed.missing import absent as _absent

__getattr__ = _absent("deepspeed.sequence")
