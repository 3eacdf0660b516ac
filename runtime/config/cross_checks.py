"""Checks of what depends on several keys."""

from __future__ import annotations

import json
from typing import Any

from .optimizers import NARROW
from .parallel import expert_size, pipeline_size, sequence_size, tensor_size
from .report import ConfigReport
from .schema import Config

LATER = "is not supported yet, and ignoring it would change results or memory use; remove it"


def show(value: Any) -> str:
    """Return `value` as short JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"this {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def cross(config: Config, report: ConfigReport) -> Config:
    """Report keys that do not require each other; return the config without what has no meaning in it."""
    problems = report.problems
    _precision(config, report)
    if config.gradient_allreduce_op == "sum" and config.zero_optimization.stage == 3:
        problems.append(("gradient_allreduce_op", '"sum" is not allowed with ZeRO stage 3, expected "mean"'))
    if config.gradient_predivide_factor != 1 and not config.prescale_gradients:
        why = 'no effect without "prescale_gradients": true'
        report.warnings.append(("gradient_predivide_factor", why))
    mode = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    param = config.data_types.param_dtype
    unsettled = report.auto & {"fp16.enabled", "bf16.enabled"}
    _narrow(config, report, mode, bool(unsettled))
    if param not in (None, mode) and not unsettled:
        problems.append(("data_types.param_dtype", f"{show(param)} contradicts the training dtype {mode}"))
    if config.aio.block_size % 4096:
        problems.append(("aio.block_size", f"{config.aio.block_size} is not a multiple of 4096"))
    config = _axes(config, report)
    _shard_groups(config, report)
    _backward_step(config, report)
    config = _local_steps(config, report)
    _optimizer(config, report)
    return _offload(config, report)


def _optimizer(config: Config, report: ConfigReport) -> None:
    """Report keys that the optimizer of the config does not go with; the engine checks a script's own."""
    section, zero = config.optimizer, config.zero_optimization
    if section is None or not isinstance(section.params, dict):
        return
    kind, params = section.type, section.params
    wide = params.get("state_dtype") in (None, "fp32")
    on_disk = zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme"
    at = "optimizer.params.state_dtype"
    stochastic = config.bf16.master_weights == "stochastic"
    if stochastic and kind not in NARROW:
        why = f'"stochastic" needs one of {", ".join(NARROW)}, and the optimizer is {kind}: remove it'
        report.problems.append(("bf16.master_weights", why))
    if not wide and kind == "SGD" and not params.get("momentum"):
        report.problems.append((at, "SGD without momentum has no state: remove the key, or set momentum"))
    if not wide and params.get("amsgrad"):
        report.problems.append((at, "cannot be combined with amsgrad, remove one of them"))
    if params.get("bias_correction") is False and params.get("amsgrad"):
        why = "false cannot be combined with amsgrad, remove one of them"
        report.problems.append(("optimizer.params.bias_correction", why))
    if on_disk and (not wide or config.bf16.master_weights == "stochastic"):
        where = "bf16.master_weights" if wide else at
        why = 'state on NVMe is fp32: set offload_optimizer.device to "cpu", or remove the key'
        report.problems.append((where, why))
    axes = {"tensor": tensor_size(config), "expert": expert_size(config), "pipeline": pipeline_size(config)}
    shared = [name for name, size in axes.items() if size > 1]
    if kind in _TOGETHER and shared:
        why = (
            f"{kind} needs whole parameters, and parallel.{shared[0]} splits them: use an element-wise "
            "optimizer such as AdamW, or remove the axis"
        )
        report.problems.append(("optimizer.type", why))
    if kind in _TOGETHER and zero.step_in_backward:
        why = f"{kind} is not element-wise: use {', '.join(NARROW)}, or remove the key"
        report.problems.append(("zero_optimization.step_in_backward", why))
    otherwise = {
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "mics_shard_size": zero.mics_shard_size > 0,
        "shard_group": zero.shard_group != "world",
    }
    for name, is_on in otherwise.items() if kind in _OF_SIGNS else ():
        if is_on:
            why = f"{kind} compresses its own all-reduce over all ranks: remove the key"
            report.problems.append((f"zero_optimization.{name}", why))
    if kind == "ZeroOneAdam" and params["local_step_clipper"] > 1:
        others = {
            f"zero_optimization.stage is {int(zero.stage)}": zero.stage > 0,
            "sequence parallelism is on": sequence_size(config) > 1,
        }
        for other in (text for text, is_so in others.items() if is_so):
            why = f"local steps need different weights on each rank, but {other}: set it to 1"
            report.problems.append(("optimizer.params.local_step_clipper", why))


def _local_steps(config: Config, report: ConfigReport) -> Config:
    """Fill in the most local steps of ZeroOneAdam, where they are not given: DeepSpeed's where there may be
    any.
    """
    section, zero = config.optimizer, config.zero_optimization
    if section is None or section.type != "ZeroOneAdam" or not isinstance(section.params, dict):
        return config
    if section.params.get("local_step_clipper") is not None:
        return config
    may = zero.stage == 0 and "zero_optimization.stage" not in report.auto and sequence_size(config) == 1
    params = {**section.params, "local_step_clipper": 16 if may else 1}
    return config.model_copy(update={"optimizer": section.model_copy(update={"params": params})})


_OF_SIGNS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
_TOGETHER = ("Lamb", "Muon", *_OF_SIGNS)


def _precision(config: Config, report: ConfigReport) -> None:
    """Report sections that each say how the model computes, and what of them nothing can do."""
    switches = {
        "fp16": config.fp16.enabled,
        "bf16": config.bf16.enabled,
        "torch_autocast": config.torch_autocast.enabled,
        "amp": config.amp.enabled,
    }
    enabled = [name for name, is_on in switches.items() if is_on]
    if len(enabled) > 1:
        both = "both" if len(enabled) == 2 else "all"
        why = f"{' and '.join(enabled)} are {both} enabled, enable only one"
        report.problems.append((f"{enabled[1]}.enabled", why))
    if config.torch_autocast.enabled and config.torch_autocast.lower_precision_safe_modules:
        why = (
            "no effect: collectives carry gradients and parameters in fp32; set communication_data_type "
            "to reduce the gradients of all modules in a narrower type"
        )
        report.warnings.append(("torch_autocast.lower_precision_safe_modules", why))
    if config.amp.enabled and config.amp.opt_level in ("O2", "O3"):
        why = (
            f"{show(config.amp.opt_level)} is apex's training with fp16 parameters: "
            'write "fp16": {"enabled": true} instead of amp (master weights stay fp32)'
        )
        report.problems.append(("amp.opt_level", why))


def _narrow(config: Config, report: ConfigReport, mode: str, is_open: bool) -> None:
    """Report contradictions between the keys of what is kept in fewer than 32 bits."""
    grad, zero = config.data_types.grad_accum_dtype, config.zero_optimization
    on_disk = zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme"
    at = "data_types.grad_accum_dtype"
    if grad not in (None, "fp32", mode) and not is_open:
        expected = '"fp32"' if mode == "fp32" else f'"fp32" or "{mode}"'
        report.problems.append((at, f"{show(grad)} contradicts training in {mode}: expected {expected}"))
    if grad not in (None, "fp32") and on_disk:
        why = 'is not supported with offload_optimizer "nvme": gradients on NVMe are fp32'
        report.problems.append((at, f"{show(grad)} {why}"))
    if config.bf16.master_weights == "stochastic" and mode != "bf16" and not is_open:
        why = f'"stochastic" needs bf16.enabled, and training is in {mode}'
        report.problems.append(("bf16.master_weights", why))


def _axes(config: Config, report: ConfigReport) -> Config:
    """Report contradictions between the keys of the mesh; return the config with its shard group settled."""
    parallel, own, problems = config.parallel, config.tensor_parallel, report.problems
    if 1 < own.autotp_size != parallel.tensor > 1:
        problems.append(("parallel.tensor", "contradicts tensor_parallel.autotp_size: give one of them"))
    if 1 < config.sequence_parallel_size != parallel.sequence > 1:
        problems.append(("parallel.sequence", "contradicts sequence_parallel_size: give one of them"))
    if config.data_parallel_size not in (None, parallel.data) and parallel.data != "auto":
        problems.append(("parallel.data", "contradicts data_parallel_size: give one of them"))
    experts = config.expert_parallel
    if experts.enabled and 1 < experts.autoep_size != parallel.expert > 1:
        problems.append(("parallel.expert", "contradicts expert_parallel.autoep_size: give one of them"))
    if experts.autoep_size > 1 and not experts.enabled:
        report.warnings.append(("expert_parallel.autoep_size", "no effect: enabled is false"))
    if experts.experts is not None and expert_size(config) <= 1:
        report.warnings.append(("expert_parallel.experts", "no effect: the expert axis has size 1"))
    size = tensor_size(config)
    if own.plan is not None and size <= 1:
        report.warnings.append(("tensor_parallel.plan", "no effect: tensor parallelism is off"))
    if own.vocab_parallel_loss and size <= 1:
        report.warnings.append(
            ("tensor_parallel.vocab_parallel_loss", "no effect: tensor parallelism is off")
        )
    stages, zero = pipeline_size(config), config.zero_optimization
    if 1 < parallel.pipeline != stages:
        problems.append(("parallel.pipeline", "contradicts pipeline.stages: give one of them"))
    if stages > 1:
        _refuse_with_axes(config, report, "pipeline parallelism")
        if zero.stage > 1 and "zero_optimization.stage" not in report.auto:
            why = "pipeline parallelism supports ZeRO stages 0 and 1 only"
            problems.append(("zero_optimization.stage", f"is {zero.stage}, and {why}"))
    elif size > 1:
        _refuse_with_axes(config, report, "tensor parallelism")
    elif expert_size(config) > 1:
        _refuse_with_axes(config, report, "expert parallelism")
    if parallel.shard_group is None:
        return config
    if zero.shard_group not in ("world", parallel.shard_group):
        problems.append(
            ("parallel.shard_group", "contradicts zero_optimization.shard_group: give one of them")
        )
    zero = zero.model_copy(update={"shard_group": parallel.shard_group})
    return config.model_copy(update={"zero_optimization": zero})


def _refuse_with_axes(config: Config, report: ConfigReport, feature: str) -> None:
    """Report keys that do not go with ranks that have parts of layers."""
    zero, shards = config.zero_optimization, "zero_optimization"
    refused = {
        f"{shards}.shard_group": zero.shard_group != "world",
        "parallel.shard_group": config.parallel.shard_group not in (None, "world"),
        f"{shards}.mics_shard_size": zero.mics_shard_size > 0,
        f"{shards}.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        f"{shards}.zero_quantized_weights": zero.zero_quantized_weights,
        f"{shards}.zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        f"{shards}.zero_quantized_gradients": zero.zero_quantized_gradients,
        "checkpoint.use_node_local_storage": config.checkpoint.use_node_local_storage,
        "checkpoint.in_memory": config.checkpoint.in_memory is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            report.problems.append((name, f"is not supported together with {feature} yet; remove one"))


def _shard_groups(config: Config, report: ConfigReport) -> None:
    """Report contradictions between the keys of groups of ranks, and of what is quantised."""
    zero, here = config.zero_optimization, "zero_optimization"
    is_open = f"{here}.stage" in report.auto
    groups = {
        "shard_group": zero.shard_group != "world",
        "mics_shard_size": zero.mics_shard_size > 0,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    given = [name for name, is_given in groups.items() if is_given]
    if len(given) > 1:
        report.problems.append((f"{here}.{given[1]}", f"contradicts {here}.{given[0]}: give one of them"))
    if given and zero.stage == 0 and not is_open:
        report.warnings.append((f"{here}.{given[0]}", "no effect: stage 0 shards nothing"))
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(zero, name) and zero.stage < 3 and not is_open:
            why = f"needs stage 3, not {zero.stage}: lower stages do not shard parameters"
            report.problems.append((f"{here}.{name}", why))
    if zero.zero_quantized_gradients and zero.stage == 0 and not is_open:
        report.problems.append((f"{here}.zero_quantized_gradients", "needs stage 1, 2 or 3, not 0"))
    loco, at = zero.zeropp_loco_param, f"{here}.zeropp_loco_param"
    if loco is None:
        return
    if not zero.zero_quantized_gradients:
        report.problems.append((at, "needs zero_quantized_gradients"))
    if loco.err_beta >= 1:
        report.problems.append((f"{at}.err_beta", f"{loco.err_beta} is not below 1"))
    if config.fp16.enabled and not config.fp16.loss_scale:
        why = "stores errors in units of the loss scale: use bf16, or a static fp16.loss_scale"
        report.problems.append((at, why))


def _backward_step(config: Config, report: ConfigReport) -> None:
    """Report what does not go with steps inside the backward pass."""
    zero, at = config.zero_optimization, "zero_optimization.step_in_backward"
    if not zero.step_in_backward:
        if zero.step_in_backward_clipping != "previous_norm":
            report.warnings.append((f"{at}_clipping", "no effect: step_in_backward is false"))
        return
    offloads = [
        name
        for name, part in (
            ("offload_optimizer", zero.offload_optimizer),
            ("offload_param", zero.offload_param),
        )
        if part is not None and part.device != "none"
    ]
    steps = config.gradient_accumulation_steps
    reasons = {
        f"needs stage 2 or 3, not {zero.stage}: lower stages do not shard gradients": zero.stage < 2
        and "zero_optimization.stage" not in report.auto,
        f"gradient_accumulation_steps is {steps}, and each backward pass is a step: make it 1": steps
        not in (None, 1),
        "needs managed_gradient_accumulation true: each backward pass is a step": (
            not config.managed_gradient_accumulation
        ),
        "an fp16 step that overflows cannot be undone: use bf16": config.fp16.enabled
        or config.autocast[0] == "fp16",
        f"is not supported with {' and '.join(offloads)}: offloaded steps need the norm first": bool(
            offloads
        ),
        "is not supported with pipeline parallelism: a step has several backward passes": pipeline_size(
            config
        )
        > 1,
    }
    report.problems += [(at, why) for why, is_so in reasons.items() if is_so]


def _offload(config: Config, report: ConfigReport) -> Config:
    zero = config.zero_optimization
    # initialize refuses an open stage; what depends on the stage is not judged until it is filled in
    is_open = "zero_optimization.stage" in report.auto
    if zero.offload_param is not None and zero.stage != 3 and not is_open:
        if zero.offload_param.device != "none":
            here, why = "zero_optimization.offload_param", "ignored: only stage 3 shards parameters"
            report.warnings.append((here, f"{why}, and this is stage {zero.stage}"))
            report.dropped[here] = why
        # gone, so that nothing that reads it later has to think of the stage
        zero = zero.model_copy(update={"offload_param": None})
        config = config.model_copy(update={"zero_optimization": zero})
    for name, part in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if part is None or part.device == "none":
            continue
        here = f"zero_optimization.{name}"
        if zero.stage == 0 and not is_open:
            report.problems.append(
                (f"{here}.device", f"{show(part.device)} needs stage 1, 2 or 3, not {zero.stage}")
            )
        if part.device == "nvme" and part.nvme_path == "...":  # as our own advice writes it
            report.problems.append(
                (f"{here}.nvme_path", "... is a placeholder: name a folder on the NVMe drive")
            )
        if part.device == "nvme" and not part.nvme_path and not (is_open and name == "offload_param"):
            report.problems.append(
                (f"{here}.nvme_path", 'is required for device "nvme": name a folder on the NVMe drive')
            )
    return config
