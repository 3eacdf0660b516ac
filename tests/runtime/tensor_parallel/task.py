"""Defines the batches and the config that the tests of tensor parallelism train with."""

from __future__ import annotations

from typing import Any

import torch

STEPS, BATCH, LENGTH, TOLERANCE = 5, 8, 12, 1e-9
EPS = 1e-4
"""Is large enough that gradients which are all but zero are not scaled up to the size of others."""


def data() -> list[torch.Tensor]:
    """Make the batches of all steps, over all ranks."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 64, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def settings(stage: int, tensor: int, data_size: int, **changes: Any) -> dict[str, Any]:
    """Return a config."""
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // data_size,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "eps": EPS}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "parallel": {"tensor": tensor},
        **changes,
    }


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest error, relative to each tensor's largest element."""
    assert found.keys() == wanted.keys()
    return max(
        ((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-12)).item()
        for name, value in wanted.items()
    )
