"""The ranks' places on named axes."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.topology import PipeDataParallelTopology as PipeDataParallelTopology
from zlaunch.compat.deepspeed.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from zlaunch.compat.deepspeed.topology import ProcessTopology as ProcessTopology

__getattr__ = _absent("deepspeed.runtime.pipe.topology")
