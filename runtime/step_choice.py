"""Decides which object steps the units of an engine: for most optimizers none but the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..cuda_ops.signs import BLOCK
from .backward_step.reducer import SteppingReducer
from .collective_step.lamb import Lamb, LambStep
from .collective_step.muon import Muon, MuonStep
from .collective_step.step import CollectiveStep
from .comm.collectives import Comm
from .errors import OptimizerError
from .log import detail
from .offload.background_step import BackgroundStep
from .one_bit.lamb_step import OneBitLambStep
from .one_bit.optimizers import OneBitAdam, OneBitLamb, OneBitOptimizer, ZeroOneAdam, agree_on_phase
from .one_bit.step import OneBitAdamStep, ZeroOneAdamStep
from .optim.sharded_optimizer import OffloadedStep
from .zero.layout import ALIGN_NUMEL
from .zero.reduce import GradientReducer
from .zero.unit import Unit

_STEPS: dict[type[torch.optim.Optimizer], type[CollectiveStep]] = {
    Lamb: LambStep,
    Muon: MuonStep,
    OneBitAdam: OneBitAdamStep,
    OneBitLamb: OneBitLambStep,
    ZeroOneAdam: ZeroOneAdamStep,
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    _STEPS[torch.optim.Muon] = MuonStep


def collective_step_of(optimizer: torch.optim.Optimizer | None) -> type[CollectiveStep] | None:
    """Return the step of an optimizer's class, if it is one that ranks make together. A subclass, which may
    step in another way, has none.
    """
    return _STEPS.get(type(optimizer)) if optimizer is not None else None


def keeps_whole_gradients(optimizer: torch.optim.Optimizer | None) -> bool:
    """Tell whether each rank keeps its whole gradients until the step, at every stage."""
    return isinstance(optimizer, OneBitOptimizer)


def error_bytes(optimizer: torch.optim.Optimizer | None, numel: int, stage: int, world_size: int) -> int:
    """Return the bytes that a 1-bit optimizer keeps on a rank besides its state, for so many trained
    elements: errors with the momentum's part, those of the rank's share, from stage 2 on whole gradients, and
    for local steps where they have begun and how far they have come.
    """
    if not keeps_whole_gradients(optimizer):
        return 0
    groups = optimizer.param_groups if optimizer is not None else ()
    local = any(group.get("local_step_clipper", 1) > 1 for group in groups)
    return 4 * (numel + numel // world_size + (numel if stage >= 2 else 0) + (2 * numel if local else 0))


def prepare(optimizer: torch.optim.Optimizer, comm: Comm, *, divides_layers: bool) -> None:
    """Let units be laid out as an optimizer needs them. Raises OptimizerError where ranks cannot step it
    together.
    """
    name = type(optimizer).__name__
    if keeps_whole_gradients(optimizer):
        if comm.link is not comm.data and not divides_layers:
            raise OptimizerError(
                f"optimizer {name} exchanges signs between all ranks: remove mics_shard_size, "
                "zero_hpz_partition_size and quantized gradients and weights"
            )
        agree_on_phase(name, optimizer.param_groups)
        if comm.rank == 0:
            steps = optimizer.param_groups[0]["freeze_step"]
            zero_one = isinstance(optimizer, ZeroOneAdam)
            first = (
                "signs of gradients, except in steps that update the variance"
                if zero_one
                else "whole gradients"
            )
            detail(f"{name}: ranks exchange {first}, for {steps} steps, then signs of momentum")
        comm.link.pieces = comm.link.size * (BLOCK // ALIGN_NUMEL)  # no block crosses the end of a part
    if divides_layers and collective_step_of(optimizer) is not None:
        raise OptimizerError(
            f"optimizer {name} needs whole parameters and does not support tensor, expert or pipeline "
            "parallelism: turn these off, or use an element-wise optimizer (Adam, AdamW, SGD, Lion)"
        )


def choose_step(
    optimizer: torch.optim.Optimizer | None, reducer: GradientReducer, comm: Comm, *, offloads: bool
) -> Callable[[Sequence[Unit]], OffloadedStep] | None:
    """Return what makes the object that steps units otherwise than all at once on the device, if any."""
    if isinstance(reducer, SteppingReducer):
        return reducer.make_step
    kind = collective_step_of(optimizer)
    if kind is not None:
        return lambda units: kind(units, comm)
    return (lambda units: BackgroundStep(units, comm, comm.device.type == "cuda")) if offloads else None
