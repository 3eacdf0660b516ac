"""Where things rest."""

from zlaunch.compat.deepspeed.config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.pickled import OffloadDeviceEnum, OffloadStateTypeEnum

__getattr__ = _absent("deepspeed.runtime.zero.offload_config")
