"""The ranks' places on named axes."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.pipe import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from zlaunch.compat.deepspeed.pipe import (
    prime_factors as _prime_factors,
)

__getattr__ = _absent("deepspeed.runtime.pipe.topology")
