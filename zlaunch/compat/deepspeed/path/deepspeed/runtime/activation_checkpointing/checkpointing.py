"""``zlaunch.checkpointing`` under DeepSpeed's names."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.recompute import (
    CheckpointFunction,
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)

__getattr__ = absent("deepspeed.checkpointing")
__all__ = [
    "CheckpointFunction",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
