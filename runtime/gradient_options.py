"""Chooses from the config how gradients are sent and summed."""

from __future__ import annotations

import torch

from .config import Config
from .precision.policy import dtype_named
from .zero.reduce import GradientOptions


def choose_gradient_options(
    config: Config, *, transient: bool = False, predivide: float = 1.0
) -> GradientOptions:
    """Return the options of a reducer, which divides gradients by ``predivide`` before it sends them.

    A gradient rests in fp32, or in ``data_types.grad_accum_dtype``; beside stochastic masters, which are
    bf16, the only one of a step rests in bf16.
    """
    chosen = dtype_named(config.data_types.grad_accum_dtype)
    sums = None if chosen == torch.float32 else chosen  # None: float64 in such a model
    is_one = not config.accumulates
    single = torch.bfloat16 if config.bf16.master_weights == "stochastic" and is_one else sums
    return GradientOptions(
        transient=transient,
        dtype=dtype_named(config.communication_data_type),
        single=single,
        sums=sums,
        predivide=predivide,
    )
