"""1-bit optimizers under DeepSpeed's names."""

from zlaunch.compat.deepspeed.optimizers import OnebitAdam, OnebitLamb, ZeroOneAdam
