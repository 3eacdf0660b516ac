"""``deepspeed.initialize`` and the engine that it returns."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zlaunch.compat.deepspeed import collectives, sequence_groups
from zlaunch.compat.deepspeed.missing import FLOPS, NotInZlaunch
from zlaunch.compat.deepspeed.moe import refuse_foreign_experts
from zlaunch.compat.deepspeed.optimizers import ZeROOptimizer
from zlaunch.compat.deepspeed.parallel import (
    _get_data_parallel_group,
    _get_sequence_parallel_group,
    count_samples_once,
    take_over_sizes,
)
from zlaunch.compat.deepspeed.parameters import use_deepspeeds_placeholders
from zlaunch.compat.deepspeed.pipe import PipelineModule, PipelineParallelGrid
from zlaunch.compat.deepspeed.save_pretrained import (
    note_state,
    replace_save_pretrained,
    restore_save_pretrained,
)
from zlaunch.compat.deepspeed.tools import ThroughputTimer, logger, set_log_level_from_string
from zlaunch.compat.deepspeed.ulysses import UlyssesSPAttentionHF
from zlaunch.runtime.api import choose_config
from zlaunch.runtime.arguments import check_arguments, choose_model
from zlaunch.runtime.build import build_engine
from zlaunch.runtime.checkpoint.export.consolidate import consolidated_state_dict
from zlaunch.runtime.data import EngineLoader
from zlaunch.runtime.engine import NO_DATA, Engine
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.parallel.sequence import note_shards
from zlaunch.runtime.precision import dtype_named
from zlaunch.runtime.zero import placeholder

# -- getters ----------------------------------------------------------------------------------------
#
# The config getters of DeepSpeed's engine: ``engine.fp16_enabled()`` and the like, from one table.


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


# -- engine -----------------------------------------------------------------------------------------


_ABSENT = {
    "checkpoint_engine": "checkpoints are written by engine.save_checkpoint itself",
    "timers": "use wall_clock_breakdown of the config, engine.tput_timer for samples per second",
    "get_wall_clock_timers": "use wall_clock_breakdown of the config, or torch.profiler",
    "set_custom_curriculum_learning_schedule": "choose the data in the script",
    "flops_profiler": FLOPS,
}
"""Members of DeepSpeed's engine that are not here, and what to do instead."""


class DeepSpeedEngine(ConfigGetters, Engine):
    """The runtime's engine with DeepSpeed's further members."""

    optimizer_class = ZeROOptimizer
    _is_compiled = False
    _in_step = False
    _shuffles = True
    """Decides whether :meth:`deepspeed_io` shuffles training data."""
    loaded_checkpoint_tag: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"DeepSpeedEngine.{name} is not supported: {_ABSENT[name]}")
        return super().__getattr__(name)

    # -- what it is made of

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the torch optimizer."""
        return self.torch_optimizer

    client_optimizer = basic_optimizer

    def loss_scale(self) -> float:  # type: ignore[override]
        """Return ``fp16.loss_scale`` of the config: 0 is dynamic. The present one is
        ``optimizer.loss_scale``.
        """
        return float(self.effective_config.fp16.loss_scale)

    @property
    def local_rank(self) -> int:
        """Return this rank's number on its node."""
        return read_environment().local_rank

    @property
    def dp_world_size(self) -> int:
        """Return the number of ranks that train on different samples."""
        return self.data_parallel_size

    seq_dp_world_size = dp_world_size

    @property
    def mp_world_size(self) -> int:
        """Return the number of ranks that share each layer."""
        return self.comm.mesh.tensor

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place among the ranks that train on different samples."""
        return self.data_parallel_rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place among the ranks that share each layer."""
        return self.global_rank % self.mp_world_size

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def data_parallel_group(self) -> Any:
        """Return the group of the ranks that train on different samples."""
        return _get_data_parallel_group()

    def get_sequence_parallel_group(self) -> Any:
        """Return the group of the ranks that have parts of the same sequences; None where all have whole
        ones.
        """
        return _get_sequence_parallel_group()

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, those of a rank's forward pass, and the passes of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_mom(self) -> list[Any]:
        """List the momentum or betas of each group."""
        groups = self.torch_optimizer.param_groups if self.torch_optimizer is not None else []
        return [group.get("momentum", group.get("betas")) for group in groups]

    def get_type(self) -> list[Any]:
        """List the ``type`` of each group, where scripts have set one."""
        groups = self.torch_optimizer.param_groups if self.torch_optimizer is not None else []
        return [group.get("type") for group in groups]

    @property
    def losses(self) -> float | None:
        """Return the last loss that went through :meth:`backward`."""
        return float(self.last_loss) if self.last_loss is not None else None

    # -- the loop

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """Measure samples per second, from a forward pass in training mode to the end of :meth:`step`."""
        return ThroughputTimer(self.device, self.train_batch_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if self.module.training:
            self.tput_timer.start()
        return super().forward(*args, **kwargs)

    def step(self, lr_kwargs: Any = None) -> None:
        """Call the runtime's step."""
        self._in_step = True
        try:
            is_boundary = self.is_gradient_accumulation_boundary()
            super().step(lr_kwargs)
        finally:
            self._in_step = False
        self.tput_timer.stop(global_step=is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next :meth:`step` applies the gradients; with ``managed_gradient_accumulation``
        false, as in DeepSpeed, whether one runs.
        """
        return super().is_gradient_accumulation_boundary() and (self._is_managed or self._in_step)

    def collect_python_gc(self) -> int:
        """Collect Python's garbage; return the number of objects that could not be reached."""
        return gc.collect()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: :meth:`backward` reduces."""

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Do nothing: reductions are batched by unit as it is."""
        yield

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many micro-batches make a step. Raises ValueError if it does not divide."""
        one = self.train_micro_batch_size_per_gpu() * self.data_parallel_size
        if train_batch_size < 1 or train_batch_size % one:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {one}, which is "
                "train_micro_batch_size_per_gpu times the data-parallel size"
            )
        self.set_batch(train_batch_size, self.train_micro_batch_size_per_gpu(), train_batch_size // one)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a forward pass; the micro-batches of a step stay as many."""
        steps = self.gradient_accumulation_steps()
        self.set_batch(micro_batch_size * steps * self.data_parallel_size, micro_batch_size, steps)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Refuse: change the batches in the script, or in ``collate_fn``."""
        raise NotInZlaunch(
            "engine.set_data_post_process_func is not supported: change the batches in the script"
        )

    def clip_fp32_gradients(self) -> None:
        """Do nothing: clipping is part of :meth:`step`."""

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Apply ``torch.compile`` to the model, in place."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Tell whether :meth:`compile` was called."""
        return self._is_compiled

    def empty_partition_cache(self) -> None:
        """Free what sharded parameters are gathered at the moment."""
        self._sharded.reshard_all()

    # -- saving

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | os.PathLike[str] | None,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Call the runtime's; return ``(None, None)`` where there is no checkpoint. Raises CheckpointError
        for a folder that does not exist, unless ``missing_ok``.
        """
        if custom_load_fn is not None:
            raise NotInZlaunch(
                "load_checkpoint(custom_load_fn=) is not supported: change the model after loading"
            )
        path, state = super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            missing_ok=missing_ok,
        )
        if path is None:
            return None, None
        self.loaded_checkpoint_tag = os.path.basename(path)
        return path, state

    def save_fp16_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Call ``save_16bit_model``, by its former name."""
        return self.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return all weights by name on rank 0, None elsewhere. Collective."""
        state = consolidated_state_dict(self._sharded, exclude_frozen=exclude_frozen_parameters)
        if self.global_rank == 0:
            return state
        note_state(self.module, is_elsewhere=True)
        return None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return ``module.state_dict()``, whole weights. Collective at stage 3."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return dict(state)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        num_tokens: int | Tensor | None = None,
    ) -> Tensor:
        """Call the runtime's; return the loss divided by the micro-batches of a step, as DeepSpeed does."""
        note_state(self.module, is_elsewhere=False)  # after a step it is an old one
        super().backward(loss, retain_graph, scale_wrt_gas, num_tokens=num_tokens)
        return loss / self.averaging.accumulation if scale_wrt_gas else loss

    def destroy(self) -> None:
        """Call the runtime's."""
        super().destroy()
        restore_save_pretrained(self.module)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Make a loader of this rank's share; ``route`` "eval" and "predict" keep the order. With a
        sampler of the caller's it is torch's DataLoader over that. ``pin_memory`` is accepted and not used:
        ``data_loader.pin_memory`` of the config decides.
        """
        if data_sampler is not None:
            return torch.utils.data.DataLoader(
                dataset,
                batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
                sampler=data_sampler,
                collate_fn=collate_fn,
                drop_last=self.effective_config.dataloader_drop_last,
                num_workers=num_local_io_workers or 0,
            )
        is_training = route == "train"
        return self.dataloader(
            dataset,
            batch_size=batch_size,
            shuffle=None if is_training and self._shuffles else False,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            training=is_training,
        )

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load weights from ``checkpoint["module"]``, or from a state dict itself."""
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint.get("module", checkpoint), dst=self.module)
            return
        self.module.load_state_dict(checkpoint.get("module", checkpoint), strict=strict)

    def dump_state(self) -> bool:
        """Return ``dump_state`` of the config."""
        return bool(self.effective_config.dump_state)


# -- whole steps ------------------------------------------------------------------------------------


class PipelineEngine(DeepSpeedEngine):
    """Is the engine of a PipelineModule, with any number of stages: whole steps with DeepSpeed's arguments,
    and a rank's place in the pipeline.
    """

    trains_whole_steps = True
    _shuffles = False
    _iterator: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return int(self.comm.mesh.pipeline)

    @property
    def stage_id(self) -> int:
        """Return the stage that this rank has."""
        comm = self.comm
        return int(comm.mesh.coordinates(comm.rank).get("pipeline", 0))

    @property
    def grid(self) -> PipelineParallelGrid:
        """Return ``PipelineModule.mpu()``, which is a collective call at the first use."""
        model = self.module
        assert isinstance(model, PipelineModule)
        return model.mpu()

    @property
    def mpu(self) -> PipelineParallelGrid:
        """Return :attr:`grid`."""
        return self.grid

    def get_pipeline_parallel_rank(self) -> int:
        """Return the stage that this rank has."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Tell whether this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Tell whether this rank has the last layers."""
        return self.stage_id == self.num_stages - 1

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set what :meth:`train_batch` takes micro-batches from."""
        self._iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set what :meth:`train_batch` takes micro-batches from, once through."""
        self._iterator = iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set what makes the pair of inputs and labels of what the data has."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Do nothing: each step may have micro-batches of another shape."""

    def _micro_batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Return what was given, else what is set, else the training data again and again.

        Raises ParameterError where there is none.
        """
        if data_iter is None and self._iterator is None:
            if self.training_dataloader is None:
                raise ParameterError(NO_DATA)
            self._iterator = _Endless(self.training_dataloader)
        found: Any = data_iter if data_iter is not None else self._iterator
        return found if self._batch_fn is None else map(self._batch_fn, found)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load, and go on with the training data where the checkpoint was written."""
        found = super().load_checkpoint(*args, **kwargs)
        if isinstance(self._iterator, _Endless):
            self._iterator = None
        return found

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # type: ignore[override]  # DeepSpeed's
        """Train a step on ``gradient_accumulation_steps`` micro-batches, pairs of inputs and labels, of
        ``data_iter``, by default the last one; return the mean loss over all ranks. Raises StopIteration at
        the end of the data.
        """
        self._iterator = data_iter or self._iterator
        return super().train_batch(self._micro_batches(None))

    def eval_batch(  # type: ignore[override]  # DeepSpeed's arguments
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss of so many micro-batches, by default as many as a step has."""
        _refuse(return_logits, compute_loss, reduce_output)
        found = self._micro_batches(data_iter)
        return super().eval_batch(found, num_micro_batches=num_micro_batches)


class _Endless(Iterator[Any]):
    """Goes through a loader again and again."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._present = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self._present)
        except StopIteration:
            self._present = iter(self._loader)
            return next(self._present)


def _refuse(return_logits: bool, compute_loss: bool, reduce_output: str | None) -> None:
    """Raise NotInZlaunch for what eval_batch does not return."""
    asked = {
        "return_logits=True": return_logits,
        "compute_loss=False": not compute_loss,
        f"reduce_output={reduce_output!r}": reduce_output != "avg",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise NotInZlaunch(
                f"engine.eval_batch({name}) is not supported: it returns only the mean loss; store "
                "other values in the model's loss_fn, on the last stage"
            )


# -- initialize -------------------------------------------------------------------------------------


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments; a script declares ``--local_rank`` itself."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed: zlaunch is")
    group.add_argument("--deepspeed_config", default=None, type=str, help="config file (JSON or YAML)")
    return parser


_live: WeakSet[DeepSpeedEngine] = WeakSet()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, EngineLoader | None, Any]:
    """Call ``zlaunch.initialize`` with DeepSpeed's engine. A model that another engine has is taken from
    it.
    """
    args, model = choose_model(args, model)
    check_arguments(
        args=args,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
    )
    collectives.discover(distributed_port)
    chosen = choose_config(args, config, config_params)
    refuse_foreign_experts(model)
    _take_over(model)
    if mpu is not None and isinstance(model, PipelineModule):
        raise NotInZlaunch(
            "initialize(mpu=...) with a PipelineModule: it makes its groups itself, leave out mpu"
        )
    if mpu is sequence_groups:
        note_shards(model, bool(UlyssesSPAttentionHF.whole_evaluations))
    use_deepspeeds_placeholders()
    engine, _, loader, scheduler = build_engine(
        PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu=None if mpu is sequence_groups else mpu,
        collate_fn=collate_fn,
        config=count_samples_once(take_over_sizes(model, chosen, mpu)),
        mesh_param=mesh_param,
    )
    if engine.effective_config.log_level is not None:
        set_log_level_from_string(engine.effective_config.log_level)
    _live.add(engine)
    replace_save_pretrained(engine.module)
    logger.info("DeepSpeed info: version=0.19.8 (zlaunch), ZeRO stage %d", engine.zero_optimization_stage())
    return engine, engine.optimizer, loader, scheduler


def _take_over(model: nn.Module) -> None:
    """End the engine that the model belongs to, if there is one: its parameters become plain again."""
    units = {id(unit) for unit in map(placeholder.owner, model.parameters()) if unit is not None}
    for engine in list(_live):
        if any(id(unit) in units for unit in engine.units):
            engine.destroy()
            _live.discard(engine)
