"""The module in which DeepSpeed has them."""

from zlaunch.compat.deepspeed.collectives import *  # noqa: F403
from zlaunch.compat.deepspeed.collectives import __all__ as __all__
from zlaunch.compat.deepspeed.missing import absent

__getattr__ = absent("deepspeed.comm")
