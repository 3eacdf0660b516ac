"""Torch optimizers under DeepSpeed's names; the engine gives them its own kernels."""

from zlaunch.compat.deepspeed.optimizers import DeepSpeedCPUAdagrad
