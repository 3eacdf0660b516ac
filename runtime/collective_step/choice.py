"""Decides which object steps the units of an engine: for most optimizers none but the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.collectives import Comm
from ..errors import OptimizerError
from ..offload.background_step import BackgroundStep
from ..optim.sharded_optimizer import OffloadedStep
from ..zero.unit import Unit
from .lamb import Lamb, LambStep
from .muon import Muon, MuonStep
from .step import CollectiveStep

_STEPS: dict[type[torch.optim.Optimizer], type[CollectiveStep]] = {Lamb: LambStep, Muon: MuonStep}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    _STEPS[torch.optim.Muon] = MuonStep


def collective_step_of(optimizer: torch.optim.Optimizer | None) -> type[CollectiveStep] | None:
    """Return the step of an optimizer's class, if it is one that ranks make together. A subclass, which may
    step in another way, has none.
    """
    return _STEPS.get(type(optimizer)) if optimizer is not None else None


def refuse_divided_layers(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError for an optimizer that ranks step together."""
    if collective_step_of(optimizer) is not None:
        raise OptimizerError(
            f"optimizer {type(optimizer).__name__} looks at whole parameters, and the axes tensor, expert "
            "and pipeline divide them: use it without these axes, or an optimizer that treats every element "
            "by itself (Adam, AdamW, SGD, Lion)"
        )


def choose_step(
    optimizer: torch.optim.Optimizer | None, comm: Comm, *, offloads: bool
) -> Callable[[Sequence[Unit]], OffloadedStep] | None:
    """Return what makes the object that steps units otherwise than all at once on the device, if any."""
    kind = collective_step_of(optimizer)
    if kind is not None:
        return lambda units: kind(units, comm)
    return (lambda units: BackgroundStep(units, comm, comm.device.type == "cuda")) if offloads else None
