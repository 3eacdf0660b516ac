"""Where things rest."""

from zlaunch.compat.deepspeed.config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.pickled import OffloadDeviceEnum, OffloadStateTypeEnum

__getattr__ = absent("deepspeed.runtime.zero.offload_config")
__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
