"""fp16 without ZeRO, with LAMB."""

from zlaunch.compat.deepspeed.optimizers import FP16_UnfusedOptimizer
