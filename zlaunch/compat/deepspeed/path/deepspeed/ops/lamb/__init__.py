"""LAMB under DeepSpeed's name."""

from zlaunch.compat.deepspeed.optimizers import FusedLamb
