"""Reductions of lists of tensors."""

from zlaunch.compat.deepspeed.collectives import reduce_scatter_coalesced
from zlaunch.compat.deepspeed.missing import absent, missing_function

_INSTEAD = "zero_optimization.zero_quantized_gradients of the config reduces gradients quantized"
all_to_all_quant_reduce = missing_function(
    "runtime.comm.coalesced_collectives.all_to_all_quant_reduce", _INSTEAD
)
all_to_all_loco_quant_reduce = missing_function(
    "runtime.comm.coalesced_collectives.all_to_all_loco_quant_reduce", _INSTEAD
)
__getattr__ = absent("deepspeed.runtime.comm.coalesced_collectives")
__all__ = ["all_to_all_loco_quant_reduce", "all_to_all_quant_reduce", "reduce_scatter_coalesced"]
