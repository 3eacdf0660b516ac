"""Builds optimizers and schedulers from the config's ``type`` and ``params``.

CONTRIBUTING.md says what else a new optimizer or schedule needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..collective_step.lamb import Lamb
from ..collective_step.muon import Muon
from ..collective_step.muon_groups import split_for_muon
from ..environment import read_environment
from ..log import warn
from ..one_bit.optimizers import OneBitAdam, OneBitLamb, ZeroOneAdam
from .lion import Lion
from .lr_schedules import SCHEDULES
from .uncorrected_adam import UncorrectedAdam

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"),
        "Rprop",
    )
) | {Lion, UncorrectedAdam}
"""Lists classes whose update of an element depends only on that element's gradient and state."""

_IGNORED = {
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
    "legacy_fusion",
    "set_grad_none",
    "capturable",
}
"""Keys that choose among DeepSpeed's implementations; here there is one. Values that would change results are
refused.
"""


_OURS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "lamb": Lamb,
    "muon": Muon,
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}
_OF_BACKENDS = (
    "bias_correction",
    "cuda_aware",
    "comm_backend_name",
)
"""Names what DeepSpeed's 1-bit optimizers take besides; config/optimizers.py says which values are right."""
_UNCORRECTED = {"onebitadam", "onebitlamb", "zerooneadam"}


def build_optimizer(
    kind: str, params: Mapping[str, Any], groups: list[dict[str, Any]], model: nn.Module
) -> torch.optim.Optimizer:
    """Build a torch optimizer over ``groups`` of the model's parameters; Muon's are split.

    As in DeepSpeed, "Adam" means decoupled weight decay (AdamW) unless ``adam_w_mode`` is false. The argument
    ``state_dtype`` becomes an entry of the param groups. Raises ValueError for an unknown type or arguments
    that it does not take.
    """
    name = kind.lower()
    arguments = {key: value for key, value in params.items() if key not in _IGNORED}
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    if name in _UNCORRECTED:
        for key in _OF_BACKENDS:
            arguments.pop(key, None)
    if name == "muon":
        arguments.pop("ns_method", None)
        rate, *own = (arguments.pop(key, None) for key in ("lr", "muon_lr", "adam_lr"))
        rates = [(1e-3 if rate is None else rate) if each is None else each for each in own]
        groups = split_for_muon(groups, model, muon_lr=rates[0], adam_lr=rates[1])
        arguments["adam_eps"] = arguments.pop("eps", 1e-8)
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or params.get("adam_w_mode", True)
        maker: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not arguments.pop("bias_correction", True):
            maker = partial(UncorrectedAdam, decoupled=decoupled)
            if arguments.pop("amsgrad", False):
                raise ValueError("optimizer.params.bias_correction: false cannot be combined with amsgrad")
            for key in ("fused", "foreach"):  # there is one implementation
                arguments.pop(key, None)
        # DeepSpeed's default for both is no decay; torch's AdamW has 0.01.
        arguments.setdefault("weight_decay", 0.0)
    else:
        maker = _OURS.get(name) or getattr(torch.optim, kind, None)
        if not (isinstance(maker, type) and issubclass(maker, torch.optim.Optimizer)):
            raise ValueError(
                f"optimizer.type: unknown {kind!r}; use AdamW, Adam, SGD or a name from torch.optim"
            )
    state_dtype = arguments.pop("state_dtype", None)
    rate = arguments.get("lr")
    if isinstance(rate, (bool, str)):
        raise ValueError(f"optimizer.params.lr: {rate!r} is not a number")
    try:
        optimizer: torch.optim.Optimizer = maker(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.params: {kind} does not accept them: {error}") from None
    if state_dtype not in (None, "fp32"):
        optimizer.defaults["state_dtype"] = state_dtype  # of groups that are added later
        for group in optimizer.param_groups:
            group.setdefault("state_dtype", state_dtype)
    return optimizer


def build_scheduler(kind: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """Build a learning-rate scheduler of ours or of torch by name. Raises ValueError as
    :func:`build_optimizer` does.
    """
    differ = len({group["lr"] for group in optimizer.param_groups}) > 1
    for key in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"):
        if isinstance(params.get(key), (int, float)) and differ and read_environment().rank == 0:
            what = f"scheduler.params.{key} overrides the learning rate of all param groups"
            warn(f"{what}, which have different ones: remove it")
    maker: Any = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if maker is None:
        known = ", ".join(SCHEDULES)
        raise ValueError(
            f"scheduler.type: unknown {kind!r}; use {known} or a class of torch.optim.lr_scheduler"
        )
    try:
        return maker(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scheduler.params: {kind} does not accept them: {error}") from None
