"""Classes that DeepSpeed's checkpoints hold."""

from zlaunch.compat.deepspeed.pickled import DynamicLossScaler, LossScaler, LossScalerBase
