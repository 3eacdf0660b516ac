"""The section ``zero_optimization`` as an object, and the stages."""

from zlaunch.compat.deepspeed.config import DeepSpeedZeroConfig, ZeroStageEnum, get_zero_config
from zlaunch.compat.deepspeed.missing import absent as _absent

from .offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

ZERO_OPTIMIZATION = "zero_optimization"

__getattr__ = _absent("deepspeed.runtime.zero.config")
