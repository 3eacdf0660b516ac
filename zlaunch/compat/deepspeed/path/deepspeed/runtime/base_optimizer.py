"""Classes for ``isinstance``."""

from zlaunch.compat.deepspeed.optimizers import DeepSpeedOptimizer, ZeROOptimizer
