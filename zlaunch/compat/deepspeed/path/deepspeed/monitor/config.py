"""Trackers are the script's."""

from zlaunch.compat.deepspeed.missing import MONITORS, absent, missing_class, missing_function

DeepSpeedMonitorConfig = missing_class("monitor.config.DeepSpeedMonitorConfig", MONITORS)
get_monitor_config = missing_function("monitor.config.get_monitor_config", MONITORS)

__getattr__ = absent("deepspeed.monitor.config")
