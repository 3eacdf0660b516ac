"""Writing events to trackers."""

from zlaunch.compat.deepspeed.config import Monitor, MonitorMaster
from zlaunch.compat.deepspeed.missing import absent

__getattr__ = absent("deepspeed.monitor.monitor")
