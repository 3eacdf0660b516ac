"""Helpers of scripts."""

from zlaunch.compat.deepspeed.log import log_dist, log_dist_once, logger, set_log_level_from_string
from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.tools import OnDevice, RepeatingLoader, instrument_w_nvtx
from zlaunch.runtime.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zlaunch.runtime.zero.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

from . import groups, logging, tensor_fragment, torch, zero_to_fp32

__getattr__ = absent("deepspeed.utils")
__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "log_dist",
    "log_dist_once",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "tensor_fragment",
    "torch",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]
