"""``zlaunch.checkpointing`` under DeepSpeed's names."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.rng_tracker import MODEL_PARALLEL, get_cuda_rng_tracker
from zlaunch.compat.deepspeed.rng_tracker import CudaRNGStatesTracker as CudaRNGStatesTracker
from zlaunch.compat.deepspeed.rng_tracker import (
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
)
from zlaunch.compat.deepspeed.rng_tracker import (
    model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed,
)
from zlaunch.compat.deepspeed.tools import *  # noqa: F403
from zlaunch.compat.deepspeed.tools import __all__ as __all__

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL
_CUDA_RNG_STATE_TRACKER = get_cuda_rng_tracker()
__getattr__ = absent("deepspeed.checkpointing")
