"""Builds optimizers and schedulers by their names in a config, and chooses how an optimizer steps.

CONTRIBUTING.md says what else a new optimizer or schedule needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...cuda_ops.signs import BLOCK
from ...cuda_ops.step import needs_kernel
from ..comm.collectives import Comm
from ..comm.link import ALIGN_NUMEL
from ..config import Config, ConfigError, Effective
from ..config.optimizers import fixed_arguments
from ..environment import read_environment
from ..errors import OptimizerError
from ..log import detail, say, warn
from ..optimizer_specs import SPECS, USE_ELEMENTWISE, OptimizerSpec, find_by_type, find_spec, load_object
from ..zero.unit import Unit
from .collective import CollectiveStep
from .in_backward import BackwardStep
from .local_steps import refuse_local_steps
from .muon import split_for_muon
from .one_bit import OneBitOptimizer, ZeroOneAdam, agree_on_phase
from .schedules import SCHEDULES
from .step import StepMethod
from .uncorrected_adam import UncorrectedAdam

# -- optimizers -------------------------------------------------------------------------------------


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
_KEY = "zero_optimization.step_in_backward"


def build_optimizer(
    kind: str, params: Mapping[str, Any], groups: list[dict[str, Any]], model: nn.Module
) -> torch.optim.Optimizer:
    """Build a torch optimizer over ``groups`` of the model's parameters; Muon's are split.

    As in DeepSpeed, "Adam" means decoupled weight decay (AdamW) unless ``adam_w_mode`` is false. The argument
    ``state_dtype`` becomes an entry of the param groups. Raises ValueError for an unknown type or arguments
    that it does not take.
    """
    spec = find_by_type(kind)
    if spec is None:
        raise ValueError(f"optimizer.type: unknown {kind!r}; use AdamW, Adam, SGD or a name from torch.optim")
    without = _IGNORED | fixed_arguments(spec.name)
    arguments = {key: value for key, value in params.items() if key not in without}
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    maker: Any = load_object(spec.classes[0])
    if spec.name == "Muon":
        # "lr" is what both kinds of groups get unless they have a rate of their own.
        rate, *own = (arguments.pop(key, None) for key in ("lr", "muon_lr", "adam_lr"))
        rates = [(1e-3 if rate is None else rate) if each is None else each for each in own]
        groups = split_for_muon(groups, model, muon_lr=rates[0], adam_lr=rates[1])
        arguments["adam_eps"] = arguments.pop("eps", 1e-8)
    if spec.name in ("Adam", "AdamW"):
        decoupled = spec.name == "AdamW" or params.get("adam_w_mode", True)
        maker = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not arguments.pop("bias_correction", True):
            maker = partial(UncorrectedAdam, decoupled=decoupled)
            if arguments.pop("amsgrad", False):
                raise ValueError("optimizer.params.bias_correction: false cannot be combined with amsgrad")
            for key in ("fused", "foreach"):  # there is one implementation
                arguments.pop(key, None)
        # DeepSpeed's default for both is no decay; torch's AdamW has 0.01.
        arguments.setdefault("weight_decay", 0.0)
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
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            f"scheduler.type: {kind} changes a learning rate, but {type(optimizer).__name__} computes its "
            "own (lr None): remove the section, or give the optimizer a learning rate"
        )
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


# -- step choice ------------------------------------------------------------------------------------
#
# Decides which object steps the units of an engine: for most optimizers none but the engine itself.


def _spec_of_class(optimizer: torch.optim.Optimizer | None) -> OptimizerSpec | None:
    """Return the spec of an optimizer's class. A subclass, which may step in another way, has none."""
    return None if optimizer is None else next(filter(partial(_is_of, type(optimizer)), SPECS), None)


def _is_of(kind: type[torch.optim.Optimizer], spec: OptimizerSpec) -> bool:
    """Tell whether a spec names a class."""
    for path in spec.classes:
        parts = path.rpartition(".")
        # A module of another package that is not imported yet has made no object.
        if getattr(sys.modules.get(parts[0]), parts[2], None) is kind:
            return True
    return False


def steps_elements(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether an optimizer's class is known to be element-wise."""
    spec = _spec_of_class(optimizer)
    return spec is not None and spec.needs == "element"


def collective_step_of(optimizer: torch.optim.Optimizer | None) -> type[CollectiveStep] | None:
    """Return the step of an optimizer's class, if it is one that ranks make together."""
    spec = _spec_of_class(optimizer)
    if spec is None or not spec.step:
        return None
    step: type[CollectiveStep] = load_object(spec.step)
    return step


def parameter_states(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Name the tensors that the step of an optimizer's class keeps for whole parameters."""
    spec = _spec_of_class(optimizer)
    return () if spec is None else spec.parameter_states


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
        # The phase decides what is sent: groups of one optimizer in two phases would need both.
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
            f"parallelism: turn these off, or {USE_ELEMENTWISE}"
        )


def check_step_in_backward(
    optimizer: torch.optim.Optimizer | None, effective: Effective, comm: Comm, *, whole: bool
) -> None:
    """Check that units can be stepped in the backward pass, where the config asks for that and there is an
    ``optimizer``. ``whole``: that gets whole tensors.

    Raises ConfigError where a step has several micro-batches, OptimizerError for an optimizer that has to see
    more than one unit's gradient.
    """
    config = effective.config
    if not config.zero_optimization.step_in_backward or optimizer is None:
        return
    if config.gradient_accumulation_steps != 1:
        raise ConfigError(
            [
                f"{effective.loaded.origin}: {_KEY}: gradient_accumulation_steps is "
                f"{config.gradient_accumulation_steps}, but each backward pass is a step: set it to 1"
            ]
        )
    if whole or collective_step_of(optimizer) is not None:
        raise OptimizerError(
            f"{_KEY} does not support optimizer {type(optimizer).__name__}, which needs whole parameters or "
            f"other ranks' data: remove the key, or {USE_ELEMENTWISE}"
        )
    if comm.rank == 0:
        say(f"step_in_backward: the optimizer steps each unit inside the backward pass; {_clipping(config)}")


def _clipping(config: Config) -> str:
    clip = float(config.gradient_clipping)
    if not clip:
        return "gradients are not clipped"
    if config.zero_optimization.step_in_backward_clipping == "value":
        return f"each element of a gradient is clipped to {clip:g}"
    return (
        f"gradients are clipped to {clip:g} by the previous step's norm, in the first step by each unit's "
        "norm"
    )


def check_local_steps(optimizer: torch.optim.Optimizer | None, config: Config, comm: Comm) -> None:
    """Raise OptimizerError where an optimizer makes steps that no other rank knows of, and a rank does not
    have whole weights and states of its own.
    """
    if not isinstance(optimizer, ZeroOneAdam):
        return
    stage = int(config.zero_optimization.stage)
    reasons = {
        f"zero_optimization.stage is {stage}": stage > 0,
        "sequence parallelism is on": comm.mesh.sequence > 1,
    }
    most = max(group["local_step_clipper"] for group in optimizer.param_groups)
    refuse_local_steps(most, reasons)


def check_loss_reduction(optimizer: torch.optim.Optimizer | None, config: Config) -> None:
    """Raise OptimizerError where losses are weighted by tokens, but each rank uses its own gradient before
    the tokens of all ranks are known.
    """
    if config.loss_reduction == "tokens" and isinstance(optimizer, OneBitOptimizer):
        raise OptimizerError(
            f'loss_reduction "tokens" is not supported with {type(optimizer).__name__}: in its compressed '
            "steps the ranks average their momentum, each with the same weight. Use AdamW"
        )


def choose_method(
    optimizer: torch.optim.Optimizer, config: Config, comm: Comm
) -> Callable[[Sequence[Unit]], StepMethod] | None:
    """Return what makes the object that an optimizer, or a step in the backward pass, steps units with; None
    if they can be stepped all at once.
    """
    if config.zero_optimization.step_in_backward:
        clip = float(config.gradient_clipping)
        by_value = config.zero_optimization.step_in_backward_clipping == "value"
        return lambda units: BackwardStep(units, comm, clip, by_value=by_value)
    kind = collective_step_of(optimizer)
    return None if kind is None else (lambda units: kind(units, comm))


# -- accepted optimizers ----------------------------------------------------------------------------
#
# Decides which optimizers may step flat shards, and which need whole tensors.


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


_VARIANT = re.compile(r"^Paged|(?:32|8|4)bit$")
"""Matches what bitsandbytes and torchao add to the name of a class."""


def needs_whole_tensors(
    optimizer: torch.optim.Optimizer, *, whole: bool, offloaded: bool, allowed: bool
) -> bool:
    """Tell whether the optimizer is to be given whole tensors instead of flat pieces.

    ``whole``: every rank updates whole parameters (stage 0, or one rank). ``offloaded``: state is kept off
    the device, and is stepped in tiles. ``allowed``: the config's zero_allow_untested_optimizer. Raises
    OptimizerError for an optimizer that would compute something else on what it gets.
    """
    name = type(optimizer).__name__
    spec = find_spec(name) or find_spec(_VARIANT.sub("", name))
    if spec is not None and spec.refused:
        raise OptimizerError(f"optimizer {name} is not supported: it {spec.refused}")
    if steps_elements(optimizer) or collective_step_of(optimizer) is not None:
        return False
    # From here on nothing is known of the class, so it gets what torch would give it, if there is that.
    if whole and not offloaded:
        return True
    place = "offload_optimizer updates tiles" if whole else "this config gives it flat shards"
    if spec is not None and spec.needs == "parameter":
        what = f"{name}, which is not {spec.classes[0]}," if spec.step else name
        raise OptimizerError(
            f"optimizer {what} needs whole tensors, but {place}: {USE_ELEMENTWISE}, or stage 0 or one rank, "
            "without offload_optimizer and tensor, expert or pipeline parallelism"
        )
    if allowed:
        return False
    raise OptimizerError(
        f"zlaunch does not know whether optimizer {name} is element-wise, and {place}. If it is, set "
        '"zero_allow_untested_optimizer": true. If it computes norms or sums over a parameter, use stage 0 '
        "or one rank, without offload_optimizer"
    )
