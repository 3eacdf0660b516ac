"""Optimizer and scheduler sections, the names they accept and the parameters of each name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ..optimizer_specs import SPECS, load_object
from .fields import (
    Betas,
    Bool,
    Count,
    Epsilons,
    NonNegative,
    Number,
    PerGroup,
    Positive,
    Section,
    Size,
    always,
    ok,
)
from .fields import Integer as LastIteration
from .unsupported import with_missing

_TYPES = (
    ", ".join(
        spec.name
        for spec in sorted(SPECS, key=lambda spec: not spec.has_kernel)
        if spec.in_config == "supported" and (spec.arguments or not spec.classes[0].startswith("torch."))
    )
    + " (docs/guides/optimizers.md) or another class of torch.optim. Case-insensitive."
)


@with_missing("optimizer")
class Optimizer(Section):
    """The optimizer to build when the script passes none."""

    type: str = Field(description=_TYPES)
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
    """Correct the bias of the moments; false means larger first steps (zlaunch.optim.UncorrectedAdam)."""
    amsgrad: Bool = ok(False)
    """Use the maximum of past second moments."""
    adam_w_mode: Bool = ok(True)
    """Decoupled weight decay, also for type Adam."""
    torch_adam: Bool | str = always(False, "zlaunch has one implementation")
    """Use torch's implementation."""
    fused: Bool | None = ok(None)
    """Use torch's fused implementation."""
    foreach: Bool | None = ok(None)
    """Use torch's foreach implementation."""
    set_grad_none: Bool = always(True, "zlaunch reuses gradient memory immediately")
    """Set gradients to None after a step."""
    state_dtype: StateDtype = ok("fp32")
    """Data type of the moments: fp32, bf16 (stochastic rounding) or int8 (quantized in blocks of 256)
    (zlaunch's own key)."""


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
    """Maximize the objective instead of minimizing it."""
    fused: Bool | None = ok(None)
    """Use torch's fused implementation."""
    foreach: Bool | None = ok(None)
    """Use torch's foreach implementation."""
    differentiable: Bool = ok(False)
    """Allow autograd through the step."""
    state_dtype: StateDtype = ok("fp32")
    """Data type of the momentum: fp32, bf16 (stochastic rounding) or int8 (quantized in blocks of 256)
    (zlaunch's own key)."""


class AdafactorParams(Params):
    """Arguments of Adafactor."""

    lr: NonNegative = ok(1e-2)
    """Learning rate; 1 / sqrt(step) where that is lower."""
    beta2_decay: Number = ok(-0.8)
    """Exponent of the step in the decay rate of second moments."""
    eps: Epsilons = ok([None, 1e-3])
    """Lower bounds of the roots of second moments (null: the distance from 1 to the next number of the data
    type) and of a parameter's root mean square."""
    d: NonNegative = ok(1.0)
    """Root mean square that an update is limited to; at least 1."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay."""
    foreach: Bool | None = ok(None)
    """Use torch's foreach implementation."""
    maximize: Bool = ok(False)
    """Maximize the objective instead of minimizing it."""


class LionParams(Params):
    """Arguments of Lion."""

    lr: NonNegative = ok(1e-4)
    """Learning rate."""
    betas: Betas = ok([0.9, 0.99])
    """Decay rates of the update direction and the momentum."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay."""
    set_grad_none: Bool = always(True, "zlaunch reuses gradient memory immediately")
    """Set gradients to None after a step."""
    fp32_optimizer_states: Bool = always(True, "state_dtype sets the momentum's type")
    """Keep the momentum in fp32."""
    state_dtype: StateDtype = ok("fp32")
    """Data type of the momentum: fp32, bf16 (stochastic rounding) or int8 (quantized in blocks of 256)
    (zlaunch's own key)."""


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
    """Minimum trust ratio."""
    max_coeff: NonNegative = ok(10.0)
    """Maximum trust ratio."""
    eps_inside_sqrt: Bool = ok(False)
    """Add eps to the second moment before the square root."""


class _OneBitParams(Params):
    """Arguments of all compressed optimizers."""

    lr: NonNegative = ok(1e-3)
    """Learning rate."""
    betas: Betas = ok([0.9, 0.999])
    """Decay rates of the two moments."""
    eps: NonNegative = ok(1e-8)
    """Added to the denominator."""
    weight_decay: NonNegative = ok(0.0)
    """Weight decay, added to the update direction."""
    bias_correction: Bool = always(True, "as in the papers, zlaunch does not correct the moments")
    """Correct the bias of the moments."""
    cuda_aware: Bool = always(False, "torch.distributed sends device memory directly", holds=False)
    """Use a CUDA-aware MPI."""
    comm_backend_name: str = always("nccl", "torch.distributed sends the bits", holds="nccl")
    """Communication library."""


class OneBitAdamParams(_OneBitParams):
    """Arguments of OneBitAdam."""

    freeze_step: Count = ok(100_000)
    """Uncompressed steps before the variance is frozen."""


class ZeroOneAdamParams(_OneBitParams):
    """Arguments of ZeroOneAdam."""

    var_freeze_step: Count = ok(100_000)
    """Steps before the variance is frozen."""
    var_update_scaler: Count = ok(16)
    """Variance updates before their interval doubles."""
    local_step_scaler: Count = ok(32678)
    """Steps with a frozen variance before the interval between exchanges doubles, up to
    local_step_clipper."""
    local_step_clipper: Count | None = ok(None)
    """Maximum steps between two exchanges. In local steps each rank has different weights, so more than 1
    needs stage 0. null is 16 at stage 0, as in DeepSpeed, and 1 from stage 1 on."""


class OneBitLambParams(OneBitAdamParams):
    """Arguments of OneBitLamb."""

    min_coeff: NonNegative = ok(0.01)
    """Minimum trust ratio."""
    max_coeff: NonNegative = ok(10.0)
    """Maximum trust ratio."""
    coeff_beta: NonNegative = ok(0.9)
    """Decay rate of the running mean of trust ratios."""
    factor_min: Positive = ok(0.5)
    """Minimum scaling factor of the trust ratio."""
    factor_max: Positive = ok(4.0)
    """Maximum scaling factor of the trust ratio."""
    factor_threshold: NonNegative = ok(0.1)
    """Maximum relative change of the scaling factor in one step."""


class MuonParams(Params):
    """Arguments of Muon. Muon updates the matrices of hidden layers, AdamW all other parameters."""

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
    """Newton-Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = ok(None)
    """Scale of the matrices' learning rate by shape: "original" (also null) is sqrt(max(1, rows / columns)),
    "match_rms_adamw" is 0.2 sqrt(max(rows, columns))."""
    betas: Betas = ok([0.9, 0.999])
    """Decay rates of AdamW's moments."""
    eps: NonNegative = ok(1e-8)
    """Added to AdamW's denominator."""
    ns_method: Literal["standard", "gram"] = always(
        "standard",
        "zlaunch has one implementation; gram sums in another order",
        holds="standard",
    )
    """Newton-Schulz implementation in DeepSpeed."""


class _Schedule(Params):
    """Arguments of every built-in scheduler."""

    last_batch_iteration: LastIteration = ok(-1)
    """Last completed step when resuming."""


class WarmupLRParams(_Schedule):
    """Increase from warmup_min_lr to warmup_max_lr, then constant."""

    warmup_min_lr: PerGroup = ok(0.0)
    """Initial learning rate."""
    warmup_max_lr: PerGroup | None = ok(None)
    """Learning rate after warm-up; null is the optimizer's."""
    warmup_num_steps: Count = ok(1000)
    """Warm-up steps."""
    warmup_type: Literal["log", "linear"] = ok("log")
    """Warm-up curve."""


class WarmupDecayLRParams(WarmupLRParams):
    """Warm-up, then linear decay to zero."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Count | None = ok(None)
    """Total training steps."""
    warmup_max_lr: PerGroup | None = ok(None)
    """Learning rate after warm-up; null is the optimizer's."""


class WarmupCosineLRParams(_Schedule):
    """Warm-up, then cosine decay, as ratios of the optimizer's learning rate."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Count | None = ok(None)
    """Total training steps."""
    warmup_min_ratio: NonNegative = ok(0.0)
    """Ratio at the start of warm-up."""
    warmup_num_steps: Count = ok(1000)
    """Warm-up steps."""
    cos_min_ratio: NonNegative = ok(1e-4)
    """Ratio at the end of training."""
    warmup_type: Literal["log", "linear"] = ok("log")
    """Warm-up curve."""


class OneCycleParams(_Schedule):
    """Increase, decrease, then slow decay. The first of the betas, where the optimizer has them, moves in the
    opposite direction. Rates and momenta can be lists of a value for each param group."""

    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")

    cycle_min_lr: PerGroup | None = ok(None)
    """Lowest learning rate of the cycle."""
    cycle_max_lr: PerGroup | None = ok(None)
    """Highest learning rate of the cycle."""
    decay_lr_rate: NonNegative = ok(0.0)
    """Decay of the learning rate after the cycle."""
    cycle_first_step_size: Count = ok(2000)
    """Steps of the first half."""
    cycle_second_step_size: Size | None = ok(None)
    """Steps of the second half; null is the same as the first."""
    cycle_first_stair_count: Size = ok(0)
    """Staircase steps in the first half; 0 is continuous."""
    cycle_second_stair_count: Size | None = ok(None)
    """Staircase steps in the second half; null is the same as the first."""
    decay_step_size: Size = ok(0)
    """Steps in one decay interval; 0 disables decay."""
    cycle_momentum: Bool = ok(True)
    """Cycle the momentum as well."""
    cycle_min_mom: PerGroup = ok(0.8)
    """Lowest momentum."""
    cycle_max_mom: PerGroup = ok(0.9)
    """Highest momentum."""
    decay_mom_rate: NonNegative = ok(0.0)
    """Decay of the momentum after the cycle."""


class LRRangeTestParams(_Schedule):
    """Increase the learning rate during training to find the value at which training diverges."""

    lr_range_test_min_lr: Positive = ok(1e-3)
    """Initial learning rate."""
    lr_range_test_step_size: Count = ok(2000)
    """Steps between two increases."""
    lr_range_test_step_rate: Positive = ok(1.0)
    """Size of one increase."""
    lr_range_test_staircase: Bool = ok(False)
    """Increase in discrete steps."""


SCHEDULER_PARAMS: dict[str, type[Params]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
SCHEDULERS = (
    *SCHEDULER_PARAMS,
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
# These need functions, other schedulers or a metric, none of which a config file can give.
LATER_SCHEDULERS = (
    "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau",
)  # fmt: skip


def optimizer_models() -> dict[str, type[Params]]:
    """Return the models of optimizers' arguments by ``optimizer.type``, those with a kernel first."""
    specs = sorted(SPECS, key=lambda spec: not spec.has_kernel)
    return {spec.name: load_object(spec.arguments) for spec in specs if spec.arguments}


def fixed_arguments(kind: str) -> frozenset[str]:
    """Return the arguments of an ``optimizer.type`` whose effect is always on: its class has none of them."""
    model = optimizer_models().get(kind, Params)
    extras = {name: info.json_schema_extra for name, info in model.model_fields.items()}
    return frozenset(
        name for name, extra in extras.items() if isinstance(extra, dict) and extra.get("support") == "always"
    )
