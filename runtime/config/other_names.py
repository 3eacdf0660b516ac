"""Other tools' names of optimizers and schedules, read as the config that means the same here."""

from __future__ import annotations

import re
from typing import Any

from ..optimizer_specs import find_by_type
from .optimizers import SCHEDULERS

_BITS = re.compile(r"([48])_?bits?")
_WRAPPING = re.compile(
    r"^.*\.|32_?bits?|[48]_?bits?|paged|deepspeed|torch|fused|foreach|apex|anyprecision|hf|bnb|npu|xla|cpu|gpu"
)
"""Matches prefixes and suffixes that Hugging Face, bitsandbytes and DeepSpeed add to an optimizer's name."""

_SCHEDULES = {
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
    "cosine_with_warmup": "WarmupCosineLR",
    "cosine_annealing": "CosineAnnealingLR",
    "cosine_with_restarts": "CosineAnnealingWarmRestarts",
    "constant_with_warmup": "WarmupLR",
    "warmup": "WarmupLR",
    "polynomial": "PolynomialLR",
    "exponential": "ExponentialLR",
    "step": "StepLR",
    "multistep": "MultiStepLR",
    "one_cycle": "OneCycle",
}
STEPS = "STEPS"
"""Stands for the number of steps of a training in what is shown."""
_WITH_LENGTH = ("WarmupDecayLR", "WarmupCosineLR")


def read_optimizer(name: Any) -> dict[str, Any]:
    """Return the keys, and their values, that ask for an optimizer which another tool calls ``name``.

    "paged_adamw_8bit" is AdamW with a state of 8 bits, kept in host memory. Empty if no optimizer here is
    meant.
    """
    if not isinstance(name, str) or len(name) > 80:
        return {}
    given = name.lower()
    bare = re.sub(r"[\W_]", "", _WRAPPING.sub("", given))
    spec = find_by_type(bare)
    if spec is None:
        return {}
    read: dict[str, Any] = {"optimizer.type": spec.name}
    if _BITS.search(given) and spec.has_kernel:
        read["optimizer.params.state_dtype"] = "int8"
    if "paged" in given or "cpu" in given:
        read["zero_optimization.offload_optimizer.device"] = "cpu"
    return read


def read_scheduler(name: Any) -> dict[str, Any]:
    """Return the keys that ask for a schedule which another tool calls ``name``; empty if none does."""
    if not isinstance(name, str) or len(name) > 80:
        return {}
    bare = name.lower().replace("-", "_").removesuffix("_schedule").removesuffix("_lr")
    kind = _SCHEDULES.get(bare)
    if kind is None:
        squeezed = re.sub(r"[\W_]", "", name.lower())
        squeezed = squeezed.removeprefix("torchoptimlrscheduler").removesuffix("lr")
        kind = {known.lower().removesuffix("lr"): known for known in SCHEDULERS}.get(squeezed)
    if kind is None:
        return {}
    read: dict[str, Any] = {"scheduler.type": kind}
    if kind in _WITH_LENGTH:
        read["scheduler.params.total_num_steps"] = STEPS
    return read
