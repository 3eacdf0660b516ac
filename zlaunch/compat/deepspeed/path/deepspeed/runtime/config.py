"""The config as an object."""

from zlaunch.compat.deepspeed.config import DeepSpeedConfig
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.runtime.config import ConfigError as DeepSpeedConfigError

__getattr__ = absent("deepspeed.runtime.config")
__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
