"""Checking a plain dict against the models: unknown keys, "auto", values, support, cross checks."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ..optimizer_specs import IN_CONFIG, KERNEL_NAMES, LATER_NAMES, OptimizerSpec, find_by_type
from .axis_sizes import expert_size, pipeline_size, sequence_size, tensor_size
from .fields import Section, modern, real
from .foreign_keys import CONTAINERS, FOREIGN, WAY_OUT, Advice, advise
from .forms import as_switch, form, forms, required_form, section_form
from .optimizers import LATER_SCHEDULERS, SCHEDULER_PARAMS, SCHEDULERS, optimizer_models
from .other_names import read_optimizer, read_scheduler
from .partition_config import read_partition_config
from .schema import EDITOR_KEY, Config

# -- known keys -------------------------------------------------------------------------------------
#
# The names of all keys, and what to say about one that is unknown where it stands.


_NOTE = re.compile(r"[^A-Za-z\s]|comments?$|$")
"""Top-level keys that are somebody's own remarks, whatever they resemble: _comment, $schema, //."""
_CLOSE = 0.75
"""Least likeness of a typo to the key that is meant: a wrong suggestion is worse than none."""
_ALIKE = 0.9
"""Least likeness of names that differ in their number of words."""
_PRECISIONS = frozenset(("fp16", "bf16", "torch_autocast"))
"""Sections of which a config enables one."""
_COMMON = frozenset(
    (
        *("classes", "copies", "data", "debug", "every", "fast", "gamma", "group", "metric", "mode", "names"),
        *("offload", "online", "overwrite", "params", "passes", "plan", "profile", "project", "ratio"),
        *("schedule", "seed", "shuffle", "stability", "team", "theta", "tol", "type", "verbose", "verbosity"),
        "version",
        "workspace",
    )
)
"""Keys of sections whose names scripts use for other things: at the top level nothing says what is meant."""
_LONGEST = 100
"""Most characters of a value that is shown in its right place."""


def join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key) or '""'


def extra(info: FieldInfo) -> dict[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the model of a sub-section, or None for a plain value."""
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def names(model: type[Section]) -> dict[str, str]:
    """Map every accepted spelling to the field's name."""
    spelled = {
        alias: name for name, info in model.model_fields.items() for alias in extra(info).get("aliases", ())
    }
    return {**{name: name for name in model.model_fields}, **spelled}


@cache
def homes() -> dict[str, list[str]]:
    """Map each key to the sections that have it, the top level being ""."""
    found: dict[str, list[str]] = {}

    def visit(model: type[Section], path: str) -> None:
        for spelling in names(model):
            places = found.setdefault(spelling, [])
            if path not in places:
                places.append(path)
        for name, info in model.model_fields.items():
            if inner := section_of(info):
                visit(inner, join(path, name))

    visit(Config, "")
    for model in optimizer_models().values():
        visit(model, "optimizer.params")
    for model in SCHEDULER_PARAMS.values():
        visit(model, "scheduler.params")
    return found


def section_at(path: str) -> type[Section] | None:
    """Return the model of the section at a dotted path, or None if there is none."""
    model: type[Section] | None = Config
    if not path:
        return model
    for name in path.split("."):
        info = model.model_fields.get(name) if model else None
        model = section_of(info) if info else None
    return model


def unknown(key: str, path: str, known: Iterable[str], value: Any = None) -> Advice:
    """Return what to say about an unknown key of the section ``path`` and its value."""
    known = list(known)
    bare = key.strip().lower()
    if bare != key and (exact := {name.lower(): name for name in known}.get(bare)):
        written = "without spaces" if key != key.strip() else "in small letters"
        return Advice(f"unknown key {key!r}, write {exact}, {written}", True)
    is_note = not path and _NOTE.match(key) is not None
    if not is_note and (found := advise(key, value, path)) is not None:
        return found
    places = [place for place in homes().get(key, ()) if place != path]
    if path in _PRECISIONS and places and _PRECISIONS.issuperset(places):
        # moved to the other section, it would switch nothing on, or the wrong dtype
        return Advice(
            f"unknown key, only {' and '.join(places)} {'have' if len(places) > 1 else 'has'} it", True
        )
    if places and (path or key not in _COMMON):
        example = form(join(places[0], key), value) if len(places) == 1 and value is not None else ""
        shown = f": {example}" if example and len(example) <= _LONGEST else ""
        return Advice(f"unknown key here, it belongs {_belongs(places)}{shown}", True)
    if not is_note and (path or key not in CONTAINERS) and (close := _closest(key, known)):
        return Advice(f"unknown key, did you mean {close}?", True)
    if path == "" or len(known) > 12:
        return Advice("unknown key", path != "")
    return Advice(f"unknown key, expected one of {', '.join(known)}", True)


def _closest(key: str, known: Iterable[str]) -> str:
    """Return the known key that ``key`` is a typo of, or a part of; "" if none is close enough.

    eval_batch_size is like train_batch_size, and is something else: each word must be like the known one.
    """
    known = list(known)
    spelled = {name.lower(): name for name in known}
    for near in difflib.get_close_matches(key.lower(), spelled, 5, _CLOSE):
        if _is_typo(key.lower(), near):
            return spelled[near]
    parts = [name for name in known if f"_{name}_".startswith(f"_{key}_") or f"_{name}_".endswith(f"_{key}_")]
    return parts[0] if "_" in key and len(parts) == 1 else ""


def _is_typo(key: str, known: str) -> bool:
    pairs = zip(key.split("_"), known.split("_"), strict=False)
    if key.count("_") == known.count("_") and all(_ratio(*pair) >= _CLOSE for pair in pairs):
        return True
    return _ratio(key.replace("_", ""), known.replace("_", "")) >= _ALIKE


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _belongs(places: list[str]) -> str:
    sections = [place for place in places if place]
    if not sections:
        return "to the top level"
    shown = ([] if len(sections) == len(places) else ["the top level"]) + sections
    if len(shown) > 3:
        return f"in a section, such as {', '.join(shown[:3])}"
    return f"in {' or '.join((', '.join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]}"


# -- report -----------------------------------------------------------------------------------------
#
# Collects what is found in a config.


@dataclass
class ConfigReport:
    """Collects what was found; every list keeps the order of the file."""

    strict: bool | None = None
    """True: every unknown key is a problem; False: none is; None: what could be a mistake is."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    auto: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    """Keeps what was given and is ignored, with the reason."""
    without_effect: list[str] = field(default_factory=list)
    """Keys, with their values, that ask for the opposite of what always holds."""


# -- cross checks -----------------------------------------------------------------------------------
#
# Checks of what depends on several keys.


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
    _partition(config, report)
    if config.gradient_allreduce_op == "sum" and config.zero_optimization.stage == 3:
        problems.append(("gradient_allreduce_op", '"sum" is not allowed with ZeRO stage 3, expected "mean"'))
    if config.gradient_allreduce_op == "sum" and config.loss_reduction == "tokens":
        why = '"tokens" averages over the tokens of all ranks, which gradient_allreduce_op "sum" contradicts'
        problems.append(("loss_reduction", why))
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


def _is_stage_open(report: ConfigReport) -> bool:
    """Return whether the stage is "auto" or rejected: the config then holds a default."""
    at = "zero_optimization.stage"
    return at in report.auto or any(here in (at, "zero_optimization") for here, _ in report.problems)


def _optimizer(config: Config, report: ConfigReport) -> None:
    """Report keys that the optimizer of the config does not go with; the engine checks a script's own."""
    section = config.optimizer
    zero = config.zero_optimization
    if section is None or not isinstance(section.params, dict):
        return
    kind = section.type
    spec = find_by_type(kind) or OptimizerSpec(name=kind, needs="unknown")  # another check reports the name
    params = section.params
    wide = params.get("state_dtype") in (None, "fp32")
    on_disk = zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme"
    at = "optimizer.params.state_dtype"
    stochastic = config.bf16.master_weights == "stochastic"
    if stochastic and not spec.has_kernel:
        why = f'"stochastic" needs one of {", ".join(KERNEL_NAMES)}, and the optimizer is {kind}: remove it'
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
    if spec.step and shared:
        why = (
            f"{kind} needs whole parameters, and parallel.{shared[0]} splits them: use an element-wise "
            "optimizer such as AdamW, or remove the axis"
        )
        report.problems.append(("optimizer.type", why))
    if spec.step and zero.step_in_backward:
        why = f"{kind} is not element-wise: use {', '.join(KERNEL_NAMES)}, or remove the key"
        report.problems.append(("zero_optimization.step_in_backward", why))
    otherwise = {
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "mics_shard_size": zero.mics_shard_size > 0,
        "shard_group": zero.shard_group != "world",
    }
    for name, is_on in otherwise.items():
        if is_on and spec.needs == "ranks":
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
    section = config.optimizer
    zero = config.zero_optimization
    if section is None or section.type != "ZeroOneAdam" or not isinstance(section.params, dict):
        return config
    if section.params.get("local_step_clipper") is not None:
        return config
    may = zero.stage == 0 and not _is_stage_open(report) and sequence_size(config) == 1
    params = {**section.params, "local_step_clipper": 16 if may else 1}
    return config.model_copy(update={"optimizer": section.model_copy(update={"params": params})})


def _partition(config: Config, report: ConfigReport) -> None:
    """Report what ``tensor_parallel.partition_config`` has that is not supported."""
    given = config.tensor_parallel.partition_config
    if given is None:
        return
    key = "tensor_parallel.partition_config"
    if config.tensor_parallel.plan is not None:
        report.problems.append((key, "contradicts tensor_parallel.plan: remove one of them"))
    try:
        read_partition_config(given)
    except ValueError as error:
        report.problems.append((key, str(error)))


def _precision(config: Config, report: ConfigReport) -> None:
    """Report sections that each say how the model computes, and what of them nothing can do."""
    switches = {
        "fp16": config.fp16.enabled,
        "bf16": config.bf16.enabled,
        "torch_autocast": config.torch_autocast.enabled,
        "amp": config.amp.enabled,
    }
    enabled = [name for name, is_on in switches.items() if is_on]
    if enabled == ["bf16", "torch_autocast"]:
        if config.torch_autocast.dtype != "bf16":
            why = "parameters are bf16 and operations float16: set torch_autocast.dtype to bfloat16"
            report.problems.append(("torch_autocast.dtype", why))
    elif len(enabled) > 1:
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
    grad = config.data_types.grad_accum_dtype
    zero = config.zero_optimization
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


_EXPERT_SIZES = frozenset(("parallel.expert", "expert_parallel.autoep_size"))


def _axes(config: Config, report: ConfigReport) -> Config:
    """Report contradictions between the keys of the mesh; return the config with its shard group settled."""
    parallel = config.parallel
    own = config.tensor_parallel
    problems = report.problems
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
    if experts.experts is not None and expert_size(config) <= 1 and not report.auto & _EXPERT_SIZES:
        report.warnings.append(("expert_parallel.experts", "no effect: the expert axis has size 1"))
    size = tensor_size(config)
    if own.plan is not None and size <= 1:
        report.warnings.append(("tensor_parallel.plan", "no effect: tensor parallelism is off"))
    for key in ("vocab_parallel_loss", "sequence_parallel"):
        if getattr(own, key) and size <= 1:
            report.warnings.append((f"tensor_parallel.{key}", "no effect: tensor parallelism is off"))
    if own.vocab_parallel_loss and config.activation_checkpointing.tiled_loss and size > 1:
        why = "does not work with tensor_parallel.vocab_parallel_loss: remove one of them"
        problems.append(("activation_checkpointing.tiled_loss", why))
    if own.sequence_parallel:
        for other, count in (
            ("pipeline", pipeline_size(config)),
            ("sequence", sequence_size(config)),
            ("expert", expert_size(config)),
        ):
            if count > 1:
                why = f"does not work with parallel.{other} {count} yet"
                problems.append(("tensor_parallel.sequence_parallel", why))
        if config.activation_checkpointing.tiled_mlp:
            why = "does not work with tensor_parallel.sequence_parallel yet: remove one of them"
            problems.append(("activation_checkpointing.tiled_mlp", why))
    stages = pipeline_size(config)
    zero = config.zero_optimization
    if 1 < parallel.pipeline != stages:
        problems.append(("parallel.pipeline", "contradicts pipeline.stages: give one of them"))
    if stages > 1:
        _refuse_with_axes(config, report, "pipeline parallelism")
        if zero.stage > 1 and not _is_stage_open(report):
            why = "pipeline parallelism supports ZeRO stages 0 and 1 only"
            problems.append(("zero_optimization.stage", f"is {zero.stage}, and {why}"))
    elif size > 1:
        _refuse_with_axes(config, report, "tensor parallelism")
    elif expert_size(config) > 1:
        _refuse_with_axes(config, report, "expert parallelism")
    elif sequence_size(config) > 1 and config.compile.enabled:
        why = "is not supported together with sequence parallelism yet; remove one"
        problems.append(("compile.enabled", why))
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
    zero = config.zero_optimization
    shards = "zero_optimization"
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
        "compile.enabled": config.compile.enabled,
    }
    for name, is_given in refused.items():
        if is_given:
            report.problems.append((name, f"is not supported together with {feature} yet; remove one"))


def _shard_groups(config: Config, report: ConfigReport) -> None:
    """Report contradictions between the keys of groups of ranks, and of what is quantised."""
    zero = config.zero_optimization
    here = "zero_optimization"
    is_open = _is_stage_open(report)
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
    loco = zero.zeropp_loco_param
    at = f"{here}.zeropp_loco_param"
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
    zero = config.zero_optimization
    at = "zero_optimization.step_in_backward"
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
        and not _is_stage_open(report),
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
        'is not supported with loss_reduction "tokens": all tokens are known after the backward pass': (
            config.loss_reduction == "tokens"
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
    is_open = _is_stage_open(report)
    if zero.offload_param is not None and zero.stage != 3 and not is_open:
        if zero.offload_param.device != "none":
            here = "zero_optimization.offload_param"
            why = "ignored: only stage 3 shards parameters"
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


# -- check ------------------------------------------------------------------------------------------


S = TypeVar("S", bound=Section)
_OFFLOADED = "zero_optimization.offload_optimizer.device"
_IGNORED = "not supported yet, ignored (it changes only speed or diagnostics)"
_EXPECTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def check(data: dict[str, Any]) -> tuple[Config | None, ConfigReport]:
    """Validate `data`; the config is None only if there are problems."""
    strict = data.get("strict")
    report = ConfigReport(strict=strict if isinstance(strict, bool) else None)
    data, problems, warnings = modern(data)
    report.problems = problems
    report.warnings = warnings
    clean = _walk(data, Config, "", report)
    _named(clean, "optimizer", report)
    _named(clean, "scheduler", report)
    config = _validate(Config, clean, "", report)
    if config is not None:
        _support(config, "", report)
        config = cross(config, report)
    _say_the_way_out_once(report)
    if report.without_effect:
        keys = ", ".join(report.without_effect)
        report.warnings.append(("", f"no effect, docs/config.md names the fixed behavior: {keys}"))
    return config, report


def _say_the_way_out_once(report: ConfigReport) -> None:
    """Leave it to the last of the problems that it applies to."""
    found = [index for index, (_, text) in enumerate(report.problems) if text.endswith(WAY_OUT)]
    for index in found[:-1]:
        here, text = report.problems[index]
        report.problems[index] = (here, text.removesuffix(WAY_OUT))


def _takes_auto(info: FieldInfo) -> bool:
    """Tell whether "auto" is a value of this field itself."""
    seen: list[Any] = [info.annotation]
    for kind in seen:
        if kind == "auto" or kind is Any:
            return True
        seen += get_args(kind)
    return False


def _walk(data: dict[str, Any], model: type[Section], path: str, report: ConfigReport) -> dict[str, Any]:
    """Return `data` under the fields' own names, without unknown keys and "auto"."""
    clean: dict[str, Any] = {}
    spellings = names(model)
    seen: dict[str, str] = {}
    for key, value in data.items():
        if not path and key == EDITOR_KEY:
            continue
        name = spellings.get(key)
        here = join(path, name or key)
        if name is None and model.model_config.get("extra") == "allow":
            clean[key] = value
            report.given.add(here)
            continue
        if name is None:
            is_container = not path and key in CONTAINERS
            inside = _look_inside(value, here) if is_container and isinstance(value, dict) else []
            advice = unknown(key, path, spellings, value)
            if advice.text not in [found.text for _, found in inside]:
                inside.insert(0, (here, advice))
            for place, found in inside:
                _report(found, place, report)
            continue
        if name in seen:
            report.problems.append((here, f"given twice, as {seen[name]} and as {key}"))
            continue
        seen[name] = key
        info = model.model_fields[name]
        inner = section_of(info)
        if inner is None and value == "auto" and not _takes_auto(info):
            report.auto.add(here)
        elif inner is not None and value is None:
            continue
        elif inner is not None and isinstance(value, dict):
            clean[name] = _walk(value, inner, here, report)
        else:
            report.given.add(here)
            clean[name] = value
    return clean


def _report(advice: Advice, here: str, report: ConfigReport) -> None:
    if report.strict or (advice.is_mistake and report.strict is None):
        report.problems.append((here, advice.text))
    else:
        report.warnings.append((here, f"{advice.text.removesuffix(WAY_OUT)}, ignored"))


def _look_inside(section: dict[str, Any], path: str) -> list[tuple[str, Advice]]:
    """Return what to say about the settings of another tool that stand in a section of that tool."""
    found = [(join(path, key), advise(key, value)) for key, value in section.items()]
    return [(here, advice) for here, advice in found if advice is not None and advice.is_mistake]


def _named(clean: dict[str, Any], key: str, report: ConfigReport) -> None:
    """Check the type and the params of the optimizer or the scheduler, in place."""
    part = clean.get(key)
    if not isinstance(part, dict):
        return
    models = optimizer_models() if key == "optimizer" else SCHEDULER_PARAMS
    known = tuple(IN_CONFIG) if key == "optimizer" else SCHEDULERS
    later = LATER_NAMES if key == "optimizer" else LATER_SCHEDULERS
    path = f"{key}.params"
    if part.get("params", {}) is None:
        del part["params"]
    params = part.get("params", {})
    if key == "optimizer" and isinstance(params, dict) and "max_grad_norm" in params:
        report.problems.append((f"{path}.max_grad_norm", "set gradient_clipping at the top level instead"))
        params = part["params"] = {k: v for k, v in params.items() if k != "max_grad_norm"}
    kind = part.get("type")
    if not isinstance(kind, str):
        return
    canonical = {name.lower(): name for name in (*known, *later)}.get(kind.lower())
    if canonical is None:
        report.problems.append((f"{key}.type", f"{show(kind)} is not known, {_meant(key, kind, known)}"))
        return
    if canonical in later:
        report.problems.append((f"{key}.type", f"{show(kind)} is not supported yet"))
        return
    part["type"] = canonical
    if not isinstance(params, dict):
        return
    report.given.discard(path)
    if key == "optimizer" and "state_dtype" in params and canonical not in KERNEL_NAMES:
        if params["state_dtype"] not in (None, "fp32"):
            why = f"{canonical} supports fp32 state only: use {', '.join(KERNEL_NAMES)}, or remove the key"
            report.problems.append((f"{path}.state_dtype", why))
        params = part["params"] = {k: v for k, v in params.items() if k != "state_dtype"}
    if model := models.get(canonical):
        checked = _validate(model, _walk(params, model, path, report), path, report)
        if checked is None:
            return
        _support(checked, path, report)
        for name in model.required:
            if getattr(checked, name) is None and f"{path}.{name}" not in report.auto:
                report.problems.append((f"{path}.{name}", f"is required for {canonical}"))
        part["params"] = checked.model_dump(exclude_unset=True)
    else:
        part["params"] = _free_params(params, path, report)


def _meant(key: str, kind: str, known: Sequence[str]) -> str:
    """Return what to write for an unknown type of an optimizer or a scheduler."""
    if read := read_optimizer(kind) if key == "optimizer" else read_scheduler(kind):
        note = " (at stage 1, 2 or 3)" if _OFFLOADED in read else ""
        return f"write {forms(read)}{note}"
    lower = {name.lower(): name for name in known}
    if close := difflib.get_close_matches(kind.lower(), lower, 1, 0.75):
        return f"did you mean {lower[close[0]]}?"
    return f"expected one of {', '.join(known)}"


def _free_params(params: dict[str, Any], path: str, report: ConfigReport) -> dict[str, Any]:
    """Take arguments of a torch class as they are; YAML's numeric strings become numbers."""
    clean: dict[str, Any] = {}
    for name, value in params.items():
        meant = FOREIGN[name].keys if name in FOREIGN else ()
        if any(key.startswith(f"{path}.") and key != f"{path}.{name}" for key in meant):
            report.problems.append((f"{path}.{name}", unknown(name, path, (), value).text))
        if value == "auto":
            report.auto.add(f"{path}.{name}")
            continue
        report.given.add(f"{path}.{name}")
        number = real(value) if isinstance(value, str) else None
        clean[name] = value if number is None else number
    return clean


def _validate(model: type[S], data: dict[str, Any], path: str, report: ConfigReport) -> S | None:
    """Build the model; wrong values are reported and dropped, so that the other checks still run."""
    for _ in range(4):
        try:
            return model.model_validate(data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                loc = item["loc"]
                here = ".".join(str(part) for part in ((path, *loc) if path else loc))
                report.problems.append((here, _message(item, here)))  # type: ignore[arg-type]
                _drop(data, loc)
    return None


def _message(item: dict[str, Any], path: str) -> str:
    kind = item["type"]
    value = item["input"]
    context = item.get("ctx") or {}
    if kind == "missing":
        return f"is required{required_form(path)}"
    if kind == "value_error":
        expected = str(context.get("error"))
    elif kind == "literal_error":
        expected = "one of " + str(context.get("expected")).replace("'", "").replace(" or ", ", ")
    else:
        expected = _EXPECTED.get(kind, "") or item["msg"]
    if expected == _EXPECTED["dict_type"]:
        section = section_at(path)
        has_switch = section is not None and "enabled" in section.model_fields
        example = section_form(path, value, has_switch)
        expected += f": {example}" if example else ""
    elif kind == "bool_type" and isinstance(value, str) and (switch := as_switch(value)) is not None:
        quoted = value.strip().lower() in ("true", "false")
        expected = f"{show(switch)}, without quotes" if quoted else show(switch)
    return f"{show(value)} is not allowed, expected {expected}"


def _drop(data: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Delete what `loc` names, or the innermost object around it that holds it."""
    parent = data
    name = loc[0]
    for part in loc[1:]:
        inner = parent.get(str(name))
        if not isinstance(inner, dict) or part not in inner:
            break
        parent = inner
        name = part
    parent.pop(str(name), None)


def _support(part: Section, path: str, report: ConfigReport, feature: str = "") -> None:
    """Report keys that are set to something else than their default and are not used as they say.

    ``feature``: what the section is, if a key that switches it on is to be refused by that name.
    """
    fields = type(part).model_fields
    if part.gate:
        if _is_off(getattr(part, part.gate), fields[part.gate]):
            return
        if part.level != "supported":
            fields = {part.gate: fields[part.gate]}
    for name, info in fields.items():
        value = getattr(part, name)
        level = extra(info).get("support")
        here = join(path, name)
        if isinstance(value, Section) and level is None:
            _support(value, here, report, (info.description or "").rstrip("."))
            continue
        level = level or part.level
        if level == "always":
            holds = extra(info).get("holds", value)
            if here in report.given and value != holds:
                report.without_effect.append(f"{here} {show(value)}")
            continue
        if level == "supported" or (isinstance(value, Section) and info.default_factory):
            continue
        if _is_off(value, info):
            continue
        if level == "speed":
            report.warnings.append((here, _IGNORED))
            continue
        missing = extra(info).get("feature") or (feature if name == part.gate else "")
        default = "" if info.default is None else f" or set it to {show(info.default)}"
        given = "" if isinstance(value, (dict, Section)) else f"{show(value)} "
        asks = f"{given}asks for {missing}, which " if missing else given
        report.problems.append((here, f"{asks}{LATER}{default}"))


def _is_off(value: Any, info: FieldInfo) -> bool:
    """Tell whether the field asks for nothing."""
    return (
        value == info.default or value in extra(info).get("off", ()) or (info.default is None and not value)
    )
