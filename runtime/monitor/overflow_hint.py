"""Knows why a model may overflow in fp16: it was trained in bf16, whose range is larger."""

from __future__ import annotations

import torch
from torch import nn

from ..config import Config
from ..precision.policy import choose_precision

_BF16 = (torch.bfloat16, "bfloat16", "torch.bfloat16")


def find_overflow_hint(model: nn.Module, config: Config) -> str:
    """Return what to say where gradients overflow in fp16: not empty where the model's values, or the config
    of a Hugging Face model, are in bf16. Call it before the model is converted.
    """
    precision = choose_precision(config)
    if torch.float16 not in (precision.dtype, precision.autocast):
        return ""
    described = getattr(model, "config", None)
    kinds = [getattr(described, name, None) for name in ("dtype", "torch_dtype")]
    in_bf16 = any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    if not in_bf16 and not any(kind in _BF16 for kind in kinds if isinstance(kind, (str, torch.dtype))):
        return ""
    instead = '"fp16": {"enabled": false}, "bf16": {"enabled": true}'
    if precision.autocast is not None:
        instead = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}'
        instead += ', "amp": {"enabled": false}' if config.amp.enabled else ""
    return f"the model is in bf16, and fp16 cannot represent values above 65504. Use bf16: {instead}"
