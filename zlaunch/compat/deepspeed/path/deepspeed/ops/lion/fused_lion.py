"""The module in which DeepSpeed has it."""

from zlaunch.compat.deepspeed.optimizers import FusedLion
