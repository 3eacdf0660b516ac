"""The config sections of the trackers."""

from zlaunch.compat.deepspeed.config import DeepSpeedMonitorConfig, get_monitor_config
from zlaunch.compat.deepspeed.missing import absent

__getattr__ = absent("deepspeed.monitor.config")
