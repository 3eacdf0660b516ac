"""Trackers are the script's."""

from zlaunch.compat.deepspeed.missing import MONITORS, absent, missing_class

Monitor = missing_class("monitor.monitor.Monitor", MONITORS)
MonitorMaster = missing_class("monitor.monitor.MonitorMaster", MONITORS)

__getattr__ = absent("deepspeed.monitor.monitor")
