"""OnebitAdam under DeepSpeed's name."""

from zlaunch.compat.deepspeed.optimizers import OnebitAdam
