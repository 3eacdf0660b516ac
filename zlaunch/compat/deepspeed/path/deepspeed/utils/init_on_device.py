"""``OnDevice``."""

from zlaunch.compat.deepspeed.tools import OnDevice
