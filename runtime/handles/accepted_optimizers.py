"""Decides which optimizers may step flat shards, and which need whole tensors."""

from __future__ import annotations

import torch

from ...cuda_ops.step_rules import needs_kernel
from ..config import Config
from ..errors import OptimizerError
from ..registry.optimizers import ELEMENTWISE
from ..step_choice import collective_step_of

_NEVER = {
    "LBFGS": "runs the model several times in one step",
    "SparseAdam": "needs sparse gradients, and the engine's are dense",
}
_BY_SHAPE = {"Adafactor", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "LARS", "Lars"}
"""Names optimizers that are known to look at a whole tensor."""


def check_narrow(optimizer: torch.optim.Optimizer, config: Config, dtype: torch.dtype | None) -> None:
    """Raise OptimizerError for state or master values in fewer than 32 bits that no kernel steps, or that are
    to be kept on NVMe. ``dtype``: what the model computes in; None for its parameters' own.
    """
    section = config.zero_optimization.offload_optimizer
    stochastic = config.bf16.master_weights == "stochastic"
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                wide = torch.promote_types(dtype or parameter.dtype, torch.float32)
                narrow = needs_kernel(optimizer, group, torch.bfloat16 if stochastic else wide)
                if narrow and section is not None and section.device == "nvme":
                    raise ValueError(
                        "state_dtype and bf16.master_weights are not supported with offload_optimizer "
                        '"nvme": state on NVMe is fp32. Use device "cpu", or remove them'
                    )
    except ValueError as error:
        raise OptimizerError(str(error)) from None


def needs_whole_tensors(
    optimizer: torch.optim.Optimizer, *, whole: bool, offloaded: bool, allowed: bool
) -> bool:
    """Tell whether the optimizer is to be given whole tensors instead of flat pieces.

    ``whole``: every rank updates whole parameters (stage 0, or one rank). ``offloaded``: state is kept off
    the device, and is stepped in tiles. ``allowed``: the config's zero_allow_untested_optimizer. Raises
    OptimizerError for an optimizer that would compute something else on what it gets.
    """
    kind, name = type(optimizer), type(optimizer).__name__
    if name in _NEVER:
        raise OptimizerError(f"optimizer {name} is not supported: it {_NEVER[name]}")
    if kind in ELEMENTWISE or collective_step_of(optimizer) is not None:
        return False
    if whole and not offloaded:
        return True
    place = "offload_optimizer updates tiles" if whole else "this config gives it flat shards"
    if name in _BY_SHAPE:
        raise OptimizerError(
            f"optimizer {name} needs whole tensors, but {place}: use an element-wise optimizer (Adam, AdamW, "
            "SGD, Lion), or stage 0 or one rank, without offload_optimizer and tensor, expert or pipeline "
            "parallelism"
        )
    if allowed:
        return False
    raise OptimizerError(
        f"zlaunch does not know whether optimizer {name} is element-wise, and {place}. If it is, set "
        '"zero_allow_untested_optimizer": true. If it computes norms or sums over a parameter, use stage 0 '
        "or one rank, without offload_optimizer"
    )
