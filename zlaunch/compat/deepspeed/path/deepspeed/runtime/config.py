"""The config as an object."""

from zlaunch.compat.deepspeed.config import DeepSpeedConfig
from zlaunch.runtime.config import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
