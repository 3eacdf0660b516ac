"""``deepspeed.zero``."""

from zlaunch.compat.deepspeed.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.missing import missing_class
from zlaunch.compat.deepspeed.parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from zlaunch.zero import TiledLinear, TiledLinearReturnBias

from . import config, offload_config, partition_parameters, stage3, stage_1_and_2

MiCS_Init = missing_class("zero.MiCS_Init", "use zero.Init")

__getattr__ = _absent("deepspeed.zero")
