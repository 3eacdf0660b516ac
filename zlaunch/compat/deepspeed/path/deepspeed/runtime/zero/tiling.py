"""``deepspeed.runtime.zero.tiling``."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.zero import TiledLinear, TiledLinearReturnBias

__getattr__ = _absent("deepspeed.runtime.zero.tiling")
