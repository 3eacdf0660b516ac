"""Parameters of stage 3.

transformers reads, replaces and restores ``zero_wrapper_for_fp_tensor_constructor`` around each
``zero.Init``; no constructor is wrapped here.
"""

from collections.abc import Callable
from typing import Any

import torch

from zlaunch.compat.deepspeed.accelerator import get_accelerator
from zlaunch.compat.deepspeed.missing import absent, missing_class
from zlaunch.compat.deepspeed.parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    is_zero_param,
    register_external_parameter,
    unregister_external_parameter,
)

partitioned_param_data_shape = [0]
MultipleAllGatherHandles = missing_class("MultipleAllGatherHandles", "gathers are the runtime's own")
AllGatherHandle = missing_class("AllGatherHandle", "gathers are the runtime's own")
_orig_torch_arange = torch.arange
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: Any
) -> Callable[..., Any]:
    """Return ``fn`` itself."""
    return fn


__getattr__ = absent("deepspeed.runtime.zero.partition_parameters")
__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
