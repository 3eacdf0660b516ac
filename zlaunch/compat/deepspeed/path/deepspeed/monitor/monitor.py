"""Writing events to trackers."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.monitors import Monitor as Monitor
from zlaunch.compat.deepspeed.monitors import MonitorMaster as MonitorMaster

__getattr__ = absent("deepspeed.monitor.monitor")
