"""Keys of other tools' configs that ask for something, and what they are here.

DeepSpeed ignores every key that it does not know, so scripts keep their own settings in the same file. Those
are warnings. A key that is listed here, or a section that is switched on, is an error: to ignore it would
train something else than what the file says.
"""

from __future__ import annotations

from typing import Any

_PRECISION = "bf16.enabled or fp16.enabled"
_CLIPPING = "gradient_clipping"
_ACCUMULATION = "gradient_accumulation_steps"
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_RATE = "optimizer.params.lr"
_RECOMPUTE = "activation_checkpointing.enabled"
_SCHEDULE = "scheduler.type"
_WARMUP = "scheduler.params.warmup_num_steps"
_STAGE = "zero_optimization.stage"

FOREIGN: dict[str, str] = {
    "zero_stage": _STAGE,
    "deepspeed_stage": _STAGE,
    "sharding_strategy": _STAGE,
    "fsdp": _STAGE,
    "fsdp_config": _STAGE,
    "fsdp_sharding_strategy": _STAGE,
    "zero": "zero_optimization",
    "deepspeed_config": "",
    "offload_optimizer_device": "zero_optimization.offload_optimizer",
    "offload_param_device": "zero_optimization.offload_param",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer",
    "offload_param_nvme_path": "zero_optimization.offload_param",
    "mixed_precision": _PRECISION,
    "precision": _PRECISION,
    "torch_dtype": _PRECISION,
    "compute_dtype": _PRECISION,
    "use_fp16": "fp16.enabled",
    "use_bf16": "bf16.enabled",
    "half": "fp16.enabled",
    "fp8": "",
    "max_grad_norm": _CLIPPING,
    "gradient_clip_val": _CLIPPING,
    "clip_grad": _CLIPPING,
    "clip_grad_norm": _CLIPPING,
    "grad_clip": _CLIPPING,
    "max_norm": _CLIPPING,
    "per_device_train_batch_size": _MICRO_BATCH,
    "per_gpu_train_batch_size": _MICRO_BATCH,
    "global_batch_size": "train_batch_size",
    "accumulate_grad_batches": _ACCUMULATION,
    "grad_accum_steps": _ACCUMULATION,
    "gradient_checkpointing": _RECOMPUTE,
    "fsdp_activation_checkpointing": _RECOMPUTE,
    "learning_rate": _RATE,
    "optim": "optimizer.type",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_type": _SCHEDULE,
    "warmup_steps": _WARMUP,
    "warmup_ratio": _WARMUP,
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pipeline_parallel_size": "parallel.pipeline",
    "expert_parallel_size": "parallel.expert",
    "expert_model_parallel_size": "parallel.expert",
    "context_parallel_size": "parallel.sequence",
    "tensor_parallel_size": "parallel.tensor",
}
"""Names of accelerate, Hugging Face's TrainingArguments, Lightning, FSDP and Megatron, too far from ours for
a typo. Empty: there is no such key here; see ``_ABSENT``.
"""
_ABSENT = {
    "fp8": "zlaunch trains in fp32, bf16 and fp16, not in fp8",
    "deepspeed_config": "this is a config of accelerate: give what stands in this section as the config",
}
WAY_OUT = ' ("strict": false ignores it, if it is for something else)'
_OFF: tuple[Any, ...] = (None, False, "", "no", "none", "None", "false", "32", "32-true", "fp32", 32)
"""Values by which these keys ask for what is so without them."""


def find_wish(key: str, value: Any) -> str | None:
    """Return what to say about an unknown top-level key that asks for something; None if it does not."""
    switch = _find_switch(value)
    if key in FOREIGN and not _is_off(value, switch):
        here = FOREIGN[key]
        return f"{_ABSENT[key] if not here else f'unknown key, this is {here} here'}{WAY_OUT}"
    if switch is not None:
        return (
            f"unknown section, and {switch}: true asks for a feature that zlaunch does not have by this name"
            f"{WAY_OUT}"
        )
    return None


def _is_off(value: Any, switch: str | None) -> bool:
    if isinstance(value, dict) and "enabled" in value:
        return switch is None
    return value in ({}, []) or any(value == off and type(value) is type(off) for off in _OFF)


def _find_switch(value: Any) -> str | None:
    """Return the path of the first ``enabled`` in a section, at any depth, that is true."""
    entries: Any = ()
    if isinstance(value, dict):
        if _is_true(value.get("enabled")):
            return "enabled"
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for name, inner in entries:
        if (found := _find_switch(inner)) is not None:
            return f"{name}.{found}"
    return None


def _is_true(value: Any) -> bool:
    return value is True or (type(value) is int and value == 1) or str(value).lower() in ("true", "yes", "on")
