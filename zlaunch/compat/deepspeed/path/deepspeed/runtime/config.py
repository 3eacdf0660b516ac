"""The config as an object."""

from zlaunch.compat.deepspeed.config import DeepSpeedConfig
from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.runtime.config import ConfigError as DeepSpeedConfigError

__getattr__ = _absent("deepspeed.runtime.config")
