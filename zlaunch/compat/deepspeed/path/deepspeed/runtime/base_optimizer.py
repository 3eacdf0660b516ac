"""Classes for ``isinstance``."""

from zlaunch.compat.deepspeed.optimizer import DeepSpeedOptimizer, ZeROOptimizer
