"""The section ``zero_optimization`` as an object, and the stages."""

from zlaunch.compat.deepspeed.config import DeepSpeedZeroConfig, get_zero_config
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.pickled import ZeroStageEnum

from .offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"

__getattr__ = absent("deepspeed.runtime.zero.config")
__all__ = [
    "ZERO_OPTIMIZATION",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
    "get_zero_config",
]
