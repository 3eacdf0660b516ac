"""Helpers that scripts call."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.missing import missing_class as _missing_class
from zlaunch.compat.deepspeed.missing import missing_function as _missing
from zlaunch.compat.deepspeed.pipe import partition_balanced, partition_uniform, prefix_sum_inc
from zlaunch.compat.deepspeed.tools import (
    call_to_str,
    clip_grad_norm_,
    move_to_device,
    required_torch_version,
    see_memory_usage,
    set_random_seed,
)

all_gather_dp_groups = _missing(
    "runtime.utils.all_gather_dp_groups",
    "change weights with zlaunch.safe_set_full_fp32_param, which also updates what the model reads",
)
PartitionedTensor = _missing_class(
    "runtime.utils.PartitionedTensor", "torch.distributed.tensor has sharded tensors"
)

__getattr__ = _absent("deepspeed.runtime.utils")
