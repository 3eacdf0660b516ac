"""Optimizer and scheduler sections, the names they accept and the parameters of each name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from .field_types import (
    Betas,
    Bool,
    Count,
    NonNegative,
    Number,
    Positive,
    Section,
    Size,
    always,
    ok,
)
from .field_types import Integer as LastIteration
from .unsupported import with_missing


@with_missing("optimizer")
class Optimizer(Section):
    """The optimizer to build when the script passes none."""

    type: str = Field()
    """Adam, AdamW, SGD, Lion, Lamb, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam (docs/guides/optimizers.md)
    or another class of torch.optim; upper and lower case do not matter."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the optimizer."""


class Scheduler(Section):
    """The learning-rate schedule to build when the script passes none."""

    type: str = Field()
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest or a torch.optim.lr_scheduler class."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the scheduler."""


StateDtype = Literal["fp32", "bf16", "int8"]


class Params(Section):
    """Arguments of one optimizer or scheduler."""

    required: ClassVar[tuple[str, ...]] = ()
    """Arguments without a default."""


@with_missing("optimizer.params")
class AdamParams(Params):
    """Arguments of Adam and AdamW."""

    lr: NonNegative = ok(1e-3)
    """Learning rate."""
    betas: Betas = ok([0.9, 0.999])
    """Decay rates of the two moments."""
    eps: NonNegative = ok(1e-8)
    """Added to the denominator."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay."""
    bias_correction: Bool = ok(True)
    """Correct the bias of the moments; false makes the first steps longer (zlaunch.optim.UncorrectedAdam)."""
    amsgrad: Bool = ok(False)
    """Use the maximum of past second moments."""
    adam_w_mode: Bool = ok(True)
    """Decoupled weight decay, also for type Adam."""
    torch_adam: Bool = always(False, "there is one implementation")
    """Use torch's implementation."""
    fused: Bool | None = ok(None)
    """Use one kernel for all parameters."""
    foreach: Bool | None = ok(None)
    """Use multi-tensor operations."""
    set_grad_none: Bool = always(True, "a gradient's memory is used again at once")
    """Set gradients to None after a step."""
    state_dtype: StateDtype = ok("fp32")
    """Type in which the moments are kept: fp32, bf16 (rounded at random) or int8 (codes in blocks of 256;
    zlaunch's own key, of SGD and Lion as well)."""


class SGDParams(Params):
    """Arguments of SGD."""

    lr: NonNegative = ok(1e-3)
    """Learning rate."""
    momentum: NonNegative = ok(0.0)
    """Momentum."""
    dampening: Number = ok(0.0)
    """Dampening of the momentum."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay."""
    nesterov: Bool = ok(False)
    """Nesterov momentum."""
    maximize: Bool = ok(False)
    """Go up instead of down."""
    fused: Bool | None = ok(None)
    """Use one kernel for all parameters."""
    foreach: Bool | None = ok(None)
    """Use multi-tensor operations."""
    differentiable: Bool = ok(False)
    """Let autograd run through the step."""
    state_dtype: StateDtype = ok("fp32")
    """Type in which the momentum is kept: fp32, bf16 (rounded at random) or int8 (codes in blocks of 256;
    zlaunch's own key)."""


class LionParams(Params):
    """Arguments of Lion."""

    lr: NonNegative = ok(1e-4)
    """Learning rate."""
    betas: Betas = ok([0.9, 0.99])
    """Decay rates of the direction and of the momentum."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay."""
    set_grad_none: Bool = always(True, "a gradient's memory is used again at once")
    """Set gradients to None after a step."""
    fp32_optimizer_states: Bool = always(True, "state_dtype says in how many bits the momentum is kept")
    """Keep the momentum in fp32."""
    state_dtype: StateDtype = ok("fp32")
    """Type in which the momentum is kept: fp32, bf16 (rounded at random) or int8 (codes in blocks of 256;
    zlaunch's own key)."""


class LambParams(Params):
    """Arguments of Lamb."""

    lr: NonNegative = ok(1e-3)
    """Learning rate."""
    betas: Betas = ok([0.9, 0.999])
    """Decay rates of the two moments."""
    eps: NonNegative = ok(1e-8)
    """Added to the denominator."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay."""
    bias_correction: Bool = ok(True)
    """Correct the bias of the moments."""
    min_coeff: NonNegative = ok(0.01)
    """Least trust ratio."""
    max_coeff: NonNegative = ok(10.0)
    """Largest trust ratio."""
    eps_inside_sqrt: Bool = ok(False)
    """Add eps to the second moment before the root."""


class _OneBitParams(Params):
    """Arguments of all optimizers that exchange signs."""

    lr: NonNegative = ok(1e-3)
    """Learning rate."""
    betas: Betas = ok([0.9, 0.999])
    """Decay rates of the two moments."""
    eps: NonNegative = ok(1e-8)
    """Added to the denominator."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay, added to the direction."""
    bias_correction: Bool = always(True, "as in the papers, the moments are not corrected")
    """Correct the bias of the moments."""
    cuda_aware: Bool = always(False, "torch.distributed sends what is on the device", holds=False)
    """Use an MPI that knows CUDA."""
    comm_backend_name: str = always("nccl", "torch.distributed sends the bits", holds="nccl")
    """Library that sends the bits."""


class OneBitAdamParams(_OneBitParams):
    """Arguments of OneBitAdam."""

    freeze_step: Count = ok(100_000)
    """Dense steps, before the variance is frozen."""


class ZeroOneAdamParams(_OneBitParams):
    """Arguments of ZeroOneAdam."""

    var_freeze_step: Count = ok(100_000)
    """Steps before the variance is frozen."""
    var_update_scaler: Count = ok(16)
    """Steps of the variance before they are twice as far apart."""
    local_step_scaler: Count = ok(32678)
    """Steps with a frozen variance before exchanges are twice as far apart, where local_step_clipper lets
    them."""
    local_step_clipper: Count | None = ok(None)
    """Most steps from one exchange to the next, between which each rank has weights of its own: more than 1
    at stage 0 alone. null is 16 there, as in DeepSpeed, and 1 from stage 1 on."""


class OneBitLambParams(OneBitAdamParams):
    """Arguments of OneBitLamb."""

    min_coeff: NonNegative = ok(0.01)
    """Least trust ratio."""
    max_coeff: NonNegative = ok(10.0)
    """Largest trust ratio."""
    coeff_beta: NonNegative = ok(0.9)
    """Decay rate of the mean of trust ratios."""
    factor_min: Positive = ok(0.5)
    """Least factor of that mean."""
    factor_max: Positive = ok(4.0)
    """Largest factor."""
    factor_threshold: NonNegative = ok(0.1)
    """Largest change of the factor in a step, as a part of it."""


class MuonParams(Params):
    """Arguments of Muon; matrices of hidden layers are stepped by it, all other parameters by AdamW."""

    lr: NonNegative = ok(1e-3)
    """Learning rate."""
    muon_lr: NonNegative | None = ok(None)
    """Learning rate of the matrices; null is lr."""
    adam_lr: NonNegative | None = ok(None)
    """Learning rate of the other parameters; null is lr."""
    momentum: NonNegative = ok(0.95)
    """Momentum of the matrices."""
    nesterov: Bool = ok(True)
    """Nesterov momentum."""
    weight_decay: NonNegative = ok(0.1)
    """Weight decay of all parameters."""
    ns_steps: Count = ok(5)
    """Steps of the Newton-Schulz iteration."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = ok(None)
    """Rule by which the matrices' rate follows their shape: "original", as null, is sqrt(max(1, rows /
    columns)), "match_rms_adamw" 0.2 sqrt(max(rows, columns))."""
    betas: Betas = ok([0.9, 0.999])
    """AdamW's decay rates of the two moments."""
    eps: NonNegative = ok(1e-8)
    """AdamW's addition to the denominator."""
    ns_method: Literal["standard", "gram"] = always(
        "standard",
        "there is one implementation; gram is the same sum in another order",
        holds="standard",
    )
    """DeepSpeed's choice among implementations."""


class _Schedule(Params):
    """Arguments that every built-in scheduler takes."""

    last_batch_iteration: LastIteration = ok(-1)
    """Last finished step when resuming."""


class WarmupLRParams(_Schedule):
    """Rise from warmup_min_lr to warmup_max_lr, then stay."""

    warmup_min_lr: NonNegative = ok(0.0)
    """Learning rate at the start."""
    warmup_max_lr: NonNegative | None = ok(None)
    """Learning rate after the warm-up; null is the optimizer's."""
    warmup_num_steps: Count = ok(1000)
    """Steps of the warm-up."""
    warmup_type: Literal["log", "linear"] = ok("log")
    """Shape of the warm-up."""


class WarmupDecayLRParams(WarmupLRParams):
    """Warm-up, then a straight line down to zero."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Count | None = ok(None)
    """Steps of the whole training."""
    warmup_max_lr: NonNegative | None = ok(None)
    """Learning rate after the warm-up; null is the optimizer's."""


class WarmupCosineLRParams(_Schedule):
    """Warm-up, then a half cosine down, as shares of the optimizer's learning rate."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Count | None = ok(None)
    """Steps of the whole training."""
    warmup_min_ratio: NonNegative = ok(0.0)
    """Share at the start."""
    warmup_num_steps: Count = ok(1000)
    """Steps of the warm-up."""
    cos_min_ratio: NonNegative = ok(1e-4)
    """Share at the end."""
    warmup_type: Literal["log", "linear"] = ok("log")
    """Shape of the warm-up."""


class OneCycleParams(_Schedule):
    """Up, down, then a slow decay; momentum runs the other way."""

    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")

    cycle_min_lr: NonNegative | None = ok(None)
    """Lowest learning rate of the cycle."""
    cycle_max_lr: NonNegative | None = ok(None)
    """Highest learning rate of the cycle."""
    decay_lr_rate: NonNegative = ok(0.0)
    """Decay of the learning rate after the cycle."""
    cycle_first_step_size: Count = ok(2000)
    """Steps of the first half."""
    cycle_second_step_size: Count | None = ok(None)
    """Steps of the second half; null is as many as in the first."""
    cycle_first_stair_count: Size = ok(0)
    """Stairs in the first half."""
    cycle_second_stair_count: Size | None = ok(None)
    """Stairs in the second half; null is as many as in the first."""
    decay_step_size: Size = ok(0)
    """Steps of one decay interval; 0 is no decay."""
    cycle_momentum: Bool = ok(True)
    """Cycle the momentum as well."""
    cycle_min_mom: NonNegative = ok(0.8)
    """Lowest momentum."""
    cycle_max_mom: NonNegative = ok(0.9)
    """Highest momentum."""
    decay_mom_rate: NonNegative = ok(0.0)
    """Decay of the momentum after the cycle."""


class LRRangeTestParams(_Schedule):
    """Raise the learning rate step by step to find where training breaks."""

    lr_range_test_min_lr: Positive = ok(1e-3)
    """Learning rate at the start."""
    lr_range_test_step_size: Count = ok(2000)
    """Steps between two rises."""
    lr_range_test_step_rate: Positive = ok(1.0)
    """Size of a rise."""
    lr_range_test_staircase: Bool = ok(False)
    """Rise in stairs."""


OPTIMIZER_PARAMS: dict[str, type[Params]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    "OneBitLamb": OneBitLambParams,
    "ZeroOneAdam": ZeroOneAdamParams,
}
SCHEDULER_PARAMS: dict[str, type[Params]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}

_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_PLAIN = {"lr": 1e-2, "weight_decay": 0.0}
# What "auto" becomes: torch's defaults. AdamW's weight decay is torch's 0.01.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "Adam": _ADAM,
    "AdamW": {**_ADAM, "weight_decay": 1e-2},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "ASGD": _PLAIN,
    "Adadelta": {"lr": 1.0, "eps": 1e-6, "weight_decay": 0.0},
    "Adafactor": _PLAIN,
    "Adagrad": {**_PLAIN, "eps": 1e-10},
    "Adamax": {**_ADAM, "lr": 2e-3},
    "Lamb": _ADAM,
    "Lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "Muon": {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8},
    "NAdam": {**_ADAM, "lr": 2e-3},
    "OneBitAdam": _ADAM,
    "OneBitLamb": _ADAM,
    "RAdam": _ADAM,
    "RMSprop": {**_PLAIN, "eps": 1e-8, "momentum": 0.0},
    "Rprop": {"lr": 1e-2},
    "ZeroOneAdam": _ADAM,
}
OPTIMIZERS = tuple(OPTIMIZER_DEFAULTS)
NARROW = ("Adam", "AdamW", "SGD", "Lion")
"""Names those that keep their state in fewer than 32 bits if they are asked to."""
# LBFGS needs a closure and SparseAdam sparse gradients.
LATER_OPTIMIZERS = (
    "MuAdam", "MuAdamW", "MuSGD", "LBFGS", "SparseAdam",
)  # fmt: skip
SCHEDULERS = (
    *SCHEDULER_PARAMS,
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
# These need functions, other schedulers or a metric, none of which a config file can give.
LATER_SCHEDULERS = (
    "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau",
)  # fmt: skip
