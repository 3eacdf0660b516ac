"""fp16 without ZeRO."""

from zlaunch.compat.deepspeed.optimizers import FP16_Optimizer
