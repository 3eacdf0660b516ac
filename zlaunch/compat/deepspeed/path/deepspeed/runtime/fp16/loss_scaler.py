"""Classes that DeepSpeed's checkpoints hold."""

from zlaunch.compat.deepspeed.config import DynamicLossScaler, LossScaler, LossScalerBase
