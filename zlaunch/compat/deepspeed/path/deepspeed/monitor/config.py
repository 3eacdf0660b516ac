"""The config sections of the trackers."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.monitors import DeepSpeedMonitorConfig as DeepSpeedMonitorConfig
from zlaunch.compat.deepspeed.monitors import get_monitor_config as get_monitor_config

__getattr__ = absent("deepspeed.monitor.config")
