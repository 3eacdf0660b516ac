"""The difficulty of samples by the step."""

from zlaunch.compat.deepspeed.missing import absent as _absent

__getattr__ = _absent("deepspeed.runtime.data_pipeline")
