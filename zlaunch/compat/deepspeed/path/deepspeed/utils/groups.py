"""Process groups of all axes."""

from zlaunch.compat.deepspeed.groups import *  # noqa: F403
from zlaunch.compat.deepspeed.groups import __all__ as __all__
from zlaunch.compat.deepspeed.missing import absent

__getattr__ = absent("deepspeed.utils.groups")
