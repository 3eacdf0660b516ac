"""Keys of other tools' configs that ask for something, and what they are here.

DeepSpeed ignores every key that it does not know, so scripts keep their own settings in the same file. Those
are warnings. A key that is listed here, or a section that is switched on, is an error: to ignore it would
train something else than what the file says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .fields import real
from .forms import as_switch, forms, read_stage
from .other_names import read_optimizer, read_scheduler

Written = dict[str, Any]
"""Dotted path of a key -> its value."""


@dataclass(frozen=True)
class ForeignKey:
    """Describes what a key of another tool is here."""

    keys: tuple[str, ...] = ()
    """Dotted paths of the keys that do the same here, any of them; empty if none does."""
    convert: Callable[[Any], Written] = lambda value: {}
    """Returns what to write for a value of the other tool, or nothing if the value does not tell."""
    note: str = ""
    """Advice where no key has the same effect, or a remark on the key."""
    off: tuple[Any, ...] = ()
    """Values that ask for nothing, beside those of ``_OFF``; they are compared with what is to be written."""
    must_read: bool = False
    """The name is a common word: it is a setting of another tool only with a value that ``convert`` reads."""
    is_wish: bool = True
    """False: the key changes nothing in what is trained; it is ignored with this advice."""


@dataclass(frozen=True)
class Advice:
    """Says what is wrong with an unknown key; ``is_mistake``: it asks for something that would not happen."""

    text: str
    is_mistake: bool


WAY_OUT = ' ("strict": false ignores unknown keys)'
_OFF: tuple[Any, ...] = (None, False, "", "no", "none", "None", "false", "32", "32-true", "fp32", 32)
"""Values by which these keys ask for what is so without them."""


def _number(path: str, *, off: tuple[Any, ...] = (), note: str = "") -> ForeignKey:
    """Return a key that takes the same number here."""

    def convert(value: Any) -> Written:
        number = real(value)
        return {} if number is None else {path: number}

    return ForeignKey((path,), convert, note, off)


def _whole_section(path: str, key: str) -> ForeignKey:
    """Return a key whose section is ``path`` here, with the value at ``key``."""
    return ForeignKey((path,), lambda value: {key: value} if isinstance(value, str) else {})


def _stage(value: Any) -> Written:
    if isinstance(value, dict):
        named = (item for key, item in value.items() if key.endswith("sharding_strategy"))
        value = next(named, 3 if value else None)
    if value is True:
        value = 3
    stage = read_stage(value)
    return {} if stage is None else {"zero_optimization.stage": stage}


def _strategy(value: Any) -> Written:
    written = _stage(value)
    if written and "offload" in str(value):
        written["zero_optimization.offload_optimizer.device"] = "cpu"
    return written


def _precision(value: Any) -> Written:
    text = str(value).lower()
    if "bf16" in text or "bfloat16" in text:
        return {"bf16.enabled": True}
    if "fp16" in text or "float16" in text or "half" in text or text.startswith("16"):
        return {"fp16.enabled": True}
    return {}


def _offload(value: Any) -> Written:
    device = value.get("device") if isinstance(value, dict) else value
    return {"zero_optimization.offload_optimizer.device": device} if device in ("cpu", "nvme") else {}


def _switch(path: str) -> Callable[[Any], Written]:
    return lambda value: {path: True}


def _betas(index: int) -> Callable[[Any], Written]:
    def convert(value: Any) -> Written:
        number = real(value)
        both: list[Any] = [0.9, 0.999]
        both[index] = number
        return {} if number is None else {"optimizer.params.betas": both}

    return convert


def _option(name: str) -> ForeignKey:
    """Return a key that is an option of the command line."""
    return ForeignKey(note=f"give it on the command line: zlaunch {name} N SCRIPT", off=("auto",))


def _spelled(foreign: ForeignKey, *names: str) -> dict[str, ForeignKey]:
    return dict.fromkeys(names, foreign)


_PRECISION = ForeignKey(("bf16.enabled", "fp16.enabled"), _precision)
_STAGE = ForeignKey(("zero_optimization.stage",), _stage, off=(0,))
_RECOMPUTE = ForeignKey(("activation_checkpointing.enabled",), _switch("activation_checkpointing.enabled"))
_ADAPTER = ForeignKey(
    note="no key sets up LoRA: wrap the model in the script, model = peft.get_peft_model(model, lora_config)"
)
_QUANTIZED = ForeignKey(
    note="zlaunch does not train quantized weights: load the model in bf16 or fp16 and shard it, write "
    '"zero_optimization": {"stage": 3}'
)
_COMPILE = ForeignKey(("compile.enabled",), _switch("compile.enabled"))
_DYNAMO = ForeignKey(
    ("compile.backend",), note='write "compile": {"enabled": true, "backend": "inductor", "kwargs": {...}}'
)
_TENSOR = _number("parallel.tensor", off=(0, 1))
_PIPELINE = _number("parallel.pipeline", off=(0, 1))
_EXPERT = _number("parallel.expert", off=(0, 1))
_SEQUENCE = _number("parallel.sequence", off=(0, 1))
_DATA = _number("parallel.data", off=(-1, 0))
_MICRO_BATCH = _number("train_micro_batch_size_per_gpu")
_WARMUP = _number("scheduler.params.warmup_num_steps", off=(0,))

FOREIGN: dict[str, ForeignKey] = {
    **_spelled(
        _STAGE, "zero_stage", "deepspeed_stage", "sharding_strategy", "fsdp_sharding_strategy", "fsdp"
    ),
    **_spelled(_STAGE, "fsdp_config", "zero", "zero3", "dp_shard_strategy"),
    "strategy": ForeignKey(("zero_optimization.stage",), _strategy, off=(0,), must_read=True),
    "data_parallel_shard_degree": ForeignKey(
        ("zero_optimization.stage", "zero_optimization.shard_group"), off=(1, -1)
    ),
    "deepspeed_config": ForeignKey(
        note="this is an accelerate config: move the keys of this section to the top level"
    ),
    **_spelled(
        ForeignKey(note="pass the value of this key, a file or a section, as the config itself"),
        *("deepspeed", "deepspeed_config_file"),
    ),
    "zero3_save_16bit_model": ForeignKey(
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save",),
        _switch("zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    ),
    "offload_optimizer_device": _whole_section(
        "zero_optimization.offload_optimizer", "zero_optimization.offload_optimizer.device"
    ),
    "offload_param_device": _whole_section(
        "zero_optimization.offload_param", "zero_optimization.offload_param.device"
    ),
    "offload_optimizer_nvme_path": _whole_section(
        "zero_optimization.offload_optimizer", "zero_optimization.offload_optimizer.nvme_path"
    ),
    "offload_param_nvme_path": _whole_section(
        "zero_optimization.offload_param", "zero_optimization.offload_param.nvme_path"
    ),
    **_spelled(
        ForeignKey(
            ("zero_optimization.offload_param",),
            lambda value: {"zero_optimization.offload_param.device": "cpu"},
        ),
        *("fsdp_offload_params", "cpu_offload_params"),
    ),
    **_spelled(
        ForeignKey(
            ("zero_optimization.offload_optimizer",),
            lambda value: {"zero_optimization.offload_optimizer.device": "cpu"},
        ),
        "enable_cpu_offload",
    ),
    "offload": ForeignKey(
        ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
        _offload,
        note="or offload_param for parameters",
        must_read=True,
    ),
    **_spelled(_PRECISION, "mixed_precision", "precision", "torch_dtype", "dtype", "compute_dtype"),
    **_spelled(_PRECISION, "mixed_precision_param", "model_dtype"),
    **_spelled(ForeignKey(("fp16.enabled",), _switch("fp16.enabled")), "use_fp16", "half", "float16"),
    **_spelled(ForeignKey(("bf16.enabled",), _switch("bf16.enabled")), "use_bf16", "bf16_training"),
    **_spelled(
        ForeignKey(("torch_autocast.enabled",), _switch("torch_autocast.enabled")), "autocast", "use_amp"
    ),
    **_spelled(ForeignKey(("tf32",), lambda value: {"tf32": value is not False}), "allow_tf32"),
    **_spelled(
        ForeignKey(
            note="zlaunch trains in fp32, bf16 and fp16, not in fp8: write " + forms({"bf16.enabled": True})
        ),
        *("fp8", "float8", "transformer_engine"),
    ),
    **_spelled(_number("gradient_clipping"), "max_grad_norm", "gradient_clip_val", "clip_grad"),
    **_spelled(_number("gradient_clipping"), "clip_grad_norm", "grad_clip", "max_norm", "gradient_clip"),
    **_spelled(_MICRO_BATCH, "per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size"),
    **_spelled(_MICRO_BATCH, "local_batch_size", "train_micro_batch_size", "micro_batch_size_per_gpu"),
    **_spelled(_MICRO_BATCH, "train_batch_size_per_gpu", "batch_size_per_device"),
    **_spelled(_MICRO_BATCH, "device_batch_size", "batch_size_per_gpu"),
    **_spelled(_number("train_batch_size"), "global_batch_size", "total_batch_size"),
    "batch_size": ForeignKey(
        ("train_micro_batch_size_per_gpu", "train_batch_size"),
        note="the first counts one forward pass on one GPU, the second one optimizer step on all GPUs",
    ),
    **_spelled(
        _number("gradient_accumulation_steps", off=(1,)),
        *("accumulate_grad_batches", "grad_accum_steps", "grad_accum", "accumulation_steps"),
        *("gradient_accumulation", "grad_accumulation", "num_grad_accumulation_steps"),
    ),
    **_spelled(
        _RECOMPUTE,
        "gradient_checkpointing",
        "fsdp_activation_checkpointing",
        "recompute",
        "recompute_activations",
    ),
    **_spelled(_RECOMPUTE, "activation_checkpoint", "enable_activation_checkpointing"),
    **_spelled(ForeignKey(("activation_checkpointing.cpu_checkpointing",)), "activation_offloading"),
    **_spelled(_number("optimizer.params.lr"), "learning_rate", "learningRate", "base_lr", "peak_lr"),
    **_spelled(ForeignKey(("optimizer.type",), read_optimizer), "optim", "optimizer_type", "optimizer_name"),
    **_spelled(ForeignKey(("optimizer.params.betas",), _betas(0)), "adam_beta1", "beta1"),
    **_spelled(ForeignKey(("optimizer.params.betas",), _betas(1)), "adam_beta2", "beta2"),
    **_spelled(_number("optimizer.params.eps"), "adam_epsilon", "epsilon", "adam_eps"),
    "wd": _number("optimizer.params.weight_decay", off=(0,)),
    **_spelled(ForeignKey(("scheduler.type",), read_scheduler), "lr_scheduler", "lr_scheduler_type"),
    **_spelled(ForeignKey(("scheduler.type",), read_scheduler), "lr_schedule", "lr_decay_style"),
    **_spelled(_WARMUP, "warmup_steps", "num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters"),
    "warmup_ratio": ForeignKey(
        ("scheduler.params.warmup_num_steps",), note="it is a number of steps, not a fraction"
    ),
    "num_training_steps": _number("scheduler.params.total_num_steps"),
    **_spelled(_TENSOR, "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree"),
    **_spelled(_TENSOR, "tp", "tp_size", "model_parallel_size", "mp_size"),
    **_spelled(_PIPELINE, "pipeline_model_parallel_size", "pipeline_parallel_size", "pp", "pp_size"),
    **_spelled(_PIPELINE, "pipeline_parallel_degree", "pipeline_parallel"),
    **_spelled(_EXPERT, "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree"),
    **_spelled(_EXPERT, "ep", "ep_size"),
    **_spelled(_SEQUENCE, "context_parallel_size", "context_parallel_degree", "cp", "cp_size"),
    "sequence_parallel": replace(
        _SEQUENCE,
        note="its value is a number of ranks. Megatron's is tensor_parallel.sequence_parallel",
    ),
    **_spelled(_SEQUENCE, "sp", "sp_size", "context_parallel"),
    **_spelled(_DATA, "dp", "dp_size", "data_parallel_replicate_degree"),
    **_spelled(_ADAPTER, "lora", "use_lora", "qlora", "peft", "peft_config", "lora_config", "adapter"),
    **_spelled(_ADAPTER, "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_rank"),
    **_spelled(_QUANTIZED, "load_in_8bit", "load_in_4bit", "quantization_config"),
    **_spelled(_COMPILE, "torch_compile", "use_torch_compile", "compile_model"),
    "dynamo_config": _DYNAMO,
    **_spelled(_option("--num_gpus"), "nproc_per_node", "num_gpus", "gpus", "n_gpus", "devices"),
    **_spelled(_option("--num_gpus"), "num_gpus_per_node", "gpus_per_node"),
    **_spelled(_option("--num_nodes"), "nnodes", "num_nodes", "num_machines"),
    **_spelled(_option("--num_processes"), "num_processes", "world_size"),
    **_spelled(_option("--master_port"), "master_port", "main_process_port"),
    **_spelled(_option("--gpu_ids"), "gpu_ids"),
    **_spelled(
        ForeignKey(
            ("steps_per_print",),
            lambda value: {} if real(value) is None else {"steps_per_print": value},
            is_wish=False,
        ),
        *("logging_steps", "log_every_n_steps", "log_interval", "log_freq"),
    ),
    "save_total_limit": ForeignKey(
        ("checkpoint.keep_last",),
        lambda value: {} if real(value) is None else {"checkpoint.keep_last": value},
        is_wish=False,
    ),
}
"""Names in accelerate, Hugging Face's TrainingArguments, Lightning, axolotl, torchtitan, FSDP, Megatron and
torchrun."""
CONTAINERS = (
    *("deepspeed_config", "deepspeed", "ds_config", "fsdp_config", "accelerate", "trainer", "training"),
    *("train", "training_args", "training_arguments", "parallelism", "parallelism_config"),
)
"""Sections of those tools: the keys inside are judged as if they stood outside."""


def advise(key: str, value: Any, section: str = "") -> Advice | None:
    """Return what to say about an unknown key that is a setting of another tool; None if it is none."""
    switch = _find_switch(value)
    if (foreign := FOREIGN.get(key)) is not None:
        written = foreign.convert(value)
        if foreign.must_read and not written:
            return None
        if not (_is_off(value, switch) or _asks_nothing(foreign, written, value)):
            return Advice(_say(foreign, written, section), foreign.is_wish)
        return None if section else Advice("has no effect", False)
    if switch is not None and not section:
        return Advice(
            f"unknown section, and {switch}: true enables a feature that zlaunch does not have by this name"
            f"{WAY_OUT}",
            True,
        )
    if isinstance(value, dict) and as_switch(value.get("enabled")) is False and not section:
        return Advice("unknown section, disabled", False)
    return None


def _say(foreign: ForeignKey, written: Written, section: str) -> str:
    way_out = WAY_OUT if foreign.is_wish and not section else ""
    if not foreign.keys:
        return f"{foreign.note}{way_out}"
    inside = f"{section}."
    if section and all(key.startswith(inside) for key in foreign.keys):
        return f"unknown key, did you mean {' or '.join(key.removeprefix(inside) for key in foreign.keys)}?"
    note = f"; {foreign.note}" if foreign.note else ""
    if not written:
        return f"unknown key, use {' or '.join(foreign.keys)}{note}{way_out}"
    key = next(iter(written))
    example = f"use {key}: {forms(written)}" if "." in key else f"write {forms(written)}"
    return f"unknown key, {example}{note}{way_out}"


def _asks_nothing(foreign: ForeignKey, written: Written, value: Any) -> bool:
    return any(_same(item, off) for item in (value, *written.values()) for off in foreign.off)


def _is_off(value: Any, switch: str | None) -> bool:
    if isinstance(value, dict) and "enabled" in value:
        return switch is None
    return value in ({}, []) or any(_same(value, off) for off in _OFF)


def _same(value: Any, off: Any) -> bool:
    return type(value) is type(off) and bool(value == off)


def _find_switch(value: Any) -> str | None:
    """Return the path of the first ``enabled`` in a section, at any depth, that is true."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        if as_switch(value.get("enabled")):
            return "enabled"
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for name, inner in entries:
        if (found := _find_switch(inner)) is not None:
            return f"{name}.{found}"
    return None
