"""The parts of the layer that is a mixture of experts."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.moe import MOELayer as MOELayer
from zlaunch.compat.deepspeed.moe import TopKGate as TopKGate

__getattr__ = _absent("deepspeed.moe.sharded_moe")
