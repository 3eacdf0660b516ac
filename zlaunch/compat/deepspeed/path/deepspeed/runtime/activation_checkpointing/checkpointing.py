"""``zlaunch.checkpointing`` under DeepSpeed's names."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.tools import *  # noqa: F403
from zlaunch.compat.deepspeed.tools import __all__

__getattr__ = absent("deepspeed.checkpointing")
