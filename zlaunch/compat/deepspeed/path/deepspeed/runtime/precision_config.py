"""The sections ``fp16`` and ``bf16`` as objects."""

from zlaunch.compat.deepspeed.config import (
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    get_bfloat16_config,
    get_float16_config,
)
from zlaunch.compat.deepspeed.missing import absent as _absent

FP16 = "fp16"
BFLOAT16 = "bf16"
BFLOAT16_OLD = "bfloat16"

__getattr__ = _absent("deepspeed.runtime.precision_config")
