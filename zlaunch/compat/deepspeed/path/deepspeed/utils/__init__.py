"""Helpers of scripts."""

from zlaunch.compat.deepspeed.missing import absent
from zlaunch.compat.deepspeed.tools import (
    OnDevice,
    RepeatingLoader,
    instrument_w_nvtx,
    log_dist,
    log_dist_once,
    logger,
    recursive_getattr,
    recursive_setattr,
    set_log_level_from_string,
)

from . import groups, logging, module_utils, tensor_fragment, torch, zero_to_fp32
from .tensor_fragment import *  # noqa: F403
from .z3_leaf_module import *  # noqa: F403

__getattr__ = absent("deepspeed.utils")
