"""``torch.distributed`` under DeepSpeed's names."""

from zlaunch.compat.deepspeed.collectives import *  # noqa: F403
from zlaunch.compat.deepspeed.collectives import __all__ as __all__
from zlaunch.compat.deepspeed.missing import absent

from . import comm as comm

__getattr__ = absent("deepspeed.comm")
