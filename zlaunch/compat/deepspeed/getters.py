"""The config getters of DeepSpeed's engine: ``engine.fp16_enabled()`` and the like, from one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zlaunch.runtime.precision.policy import dtype_named

_PATHS = {
    "aio_config": "aio",
    "amp_enabled": "amp.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "communication_data_type": "communication_data_type",
    "dataloader_drop_last": "dataloader_drop_last",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_module_granularity_threshold": "zero_optimization.stage3_module_granularity_threshold",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
}
"""Getter -> the key of the effective config that it returns."""


def read(config: Any, path: str) -> Any:
    """Return the value at a dotted path; None below a section that is not there."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
    return config


def _getter(name: str, path: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return read(self.effective_config, path)

    get.__name__ = name
    get.__doc__ = f"``{path}`` of the config, defaults filled in."
    return get


class ConfigGetters:
    """Mixin of the engine."""

    effective_config: Any
    config: Any

    def zero_optimization(self) -> bool:
        """Tell whether any ZeRO stage is on."""
        return bool(self.effective_config.zero_optimization.stage)

    def zero_optimization_partition_gradients(self) -> bool:
        """Tell whether gradients are sharded: stage 2 and up."""
        return bool(self.effective_config.zero_optimization.stage >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        """Tell whether parameters are sharded: stage 3."""
        return bool(self.effective_config.zero_optimization.stage >= 3)

    def zero_cpu_offload(self) -> bool:
        """Tell whether optimizer state is offloaded."""
        section = self.effective_config.zero_optimization.offload_optimizer
        return section is not None and section.device != "none"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Tell whether optimizer state is offloaded to NVMe."""
        section = self.effective_config.zero_optimization.offload_optimizer
        return section is not None and section.device == "nvme"

    def zero_partial_offload(self) -> float:
        """Return the share of the optimizer state that is offloaded."""
        section = self.effective_config.zero_optimization.offload_optimizer
        return float(section.ratio) if section is not None else 1.0

    def zero_use_cpu_optimizer(self) -> bool:
        """Tell whether the optimizer steps on the CPU: with offload."""
        return self.zero_cpu_offload()

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Tell whether accelerate and the Trainer save whole weights at stage 3."""
        return bool(self.effective_config.zero_optimization.stage3_gather_16bit_weights_on_model_save)

    def postscale_gradients(self) -> bool:
        """Tell whether gradients are divided after the reduction."""
        return not self.effective_config.prescale_gradients

    def amp_params(self) -> dict[str, Any] | bool:
        """Return the arguments for apex that the config has; False without the section."""
        given = self.config.get("amp")
        return {k: v for k, v in given.items() if k != "enabled"} if isinstance(given, dict) else False

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of torch.autocast, as a torch dtype."""
        return dtype_named(self.effective_config.torch_autocast.dtype)

    def dynamic_loss_scale(self) -> bool:
        """Tell whether this is fp16 with a scale that adapts."""
        section = self.effective_config.fp16
        return bool(section.enabled and section.loss_scale == 0)

    def initial_dynamic_scale(self) -> float:
        """Return the scale that fp16 training starts with."""
        return float(2**self.effective_config.fp16.initial_scale_power)


for _name, _path in _PATHS.items():
    if _name not in ConfigGetters.__dict__:
        setattr(ConfigGetters, _name, _getter(_name, _path))
