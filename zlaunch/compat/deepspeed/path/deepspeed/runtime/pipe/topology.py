"""The ranks' places on named axes."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.pipe import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__getattr__ = _absent("deepspeed.runtime.pipe.topology")
