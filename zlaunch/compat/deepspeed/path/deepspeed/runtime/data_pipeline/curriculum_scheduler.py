"""The difficulty of samples by the step."""

from zlaunch.compat.deepspeed.curriculum import CurriculumScheduler
from zlaunch.compat.deepspeed.missing import absent as _absent

__getattr__ = _absent("deepspeed.runtime.data_pipeline.curriculum_scheduler")
