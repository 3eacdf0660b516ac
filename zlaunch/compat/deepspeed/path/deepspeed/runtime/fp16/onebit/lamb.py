"""OnebitLamb under DeepSpeed's name."""

from zlaunch.compat.deepspeed.optimizers import OnebitLamb
