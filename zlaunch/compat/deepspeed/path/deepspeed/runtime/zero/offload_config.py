"""Where things rest."""

from zlaunch.compat.deepspeed.config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from zlaunch.compat.deepspeed.missing import absent as _absent

__getattr__ = _absent("deepspeed.runtime.zero.offload_config")
