"""bf16 without sharded gradients."""

from zlaunch.compat.deepspeed.optimizers import BF16_Optimizer
