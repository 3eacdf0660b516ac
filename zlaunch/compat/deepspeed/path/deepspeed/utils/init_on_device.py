"""``OnDevice``."""

from zlaunch.compat.deepspeed.tools import OnDevice

__all__ = ["OnDevice"]
