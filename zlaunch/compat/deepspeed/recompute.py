"""``deepspeed.checkpointing``: the runtime's, and the names of Megatron's scripts."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.runtime.activation.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    reset,
    set_num_layers,
)

non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """``CheckpointFunction.apply(function, outputs, *args)`` in old scripts."""

    @staticmethod
    def apply(run_function: Any, all_outputs: list[Any], *args: Any) -> None:
        """Run it; the results are appended to ``all_outputs``."""
        result = checkpoint(run_function, *args)
        all_outputs += [result] if isinstance(result, torch.Tensor) else list(result)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch ``partition_activations``."""
    configure(None, partition_activations=partition_activation)


def get_cuda_rng_tracker() -> NoReturn:
    """Refuse: it serves tensor parallelism."""
    raise NotInZlaunch(
        "get_cuda_rng_tracker belongs to Megatron's tensor parallelism, which is not supported"
    )


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator: there is one model-parallel rank."""
    torch.manual_seed(seed)


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
