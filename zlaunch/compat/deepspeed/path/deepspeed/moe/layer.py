"""The layer that is a mixture of experts."""

from zlaunch.compat.deepspeed.moe import MoE as MoE
from zlaunch.compat.deepspeed.moe import MOELayer as MOELayer
from zlaunch.compat.deepspeed.moe import TopKGate as TopKGate
