"""Process groups of all axes."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.parallel import *  # noqa: F403
from zlaunch.compat.deepspeed.parallel import __all__

__getattr__ = absent("deepspeed.utils.groups")
