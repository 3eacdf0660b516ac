"""The engine of a PipelineModule."""

from zlaunch.compat.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from zlaunch.compat.deepspeed.engine import PipelineEngine as PipelineEngine
from zlaunch.compat.deepspeed.missing import absent as _absent

__getattr__ = _absent("deepspeed.runtime.pipe.engine")
