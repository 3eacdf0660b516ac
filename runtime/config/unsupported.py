"""The keys of DeepSpeed's features that do not exist here, in one table.

A file may hold them: each is checked, and ignored with a warning or refused by its name when it asks for
something. :func:`with_missing` adds the keys of a section to its model; nothing else reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import Field, create_model

from .fields import (
    AutoInt,
    Bool,
    Bucket,
    Count,
    Dtype,
    Fraction,
    Level,
    NonNegative,
    OpenSection,
    Positive,
    Section,
    Size,
    Whole,
)

S = TypeVar("S", bound=Section)
Key = tuple[Any, Any]
"""Type and field of a key, as pydantic's create_model takes them."""
_JSON = dict[str, Any]


def _key(kind: Any, default: Any, text: str, *aliases: str, **support: Any) -> Key:
    extra: dict[str, Any] = {"aliases": list(aliases)} if aliases else {}
    extra |= {name: value for name, value in support.items() if value}
    return (kind | None if default is None else kind), Field(
        default, description=text, json_schema_extra=extra
    )


def _ignored(kind: Any, default: Any, text: str, *aliases: str) -> Key:
    """Return a key that changes only speed or diagnostics: a warning."""
    return _key(kind, default, text, *aliases, support="speed")


def _refused(kind: Any, default: Any, text: str, *, feature: str = "", off: tuple[Any, ...] = ()) -> Key:
    """Return a key that changes results or memory: an error.

    ``feature`` names what is missing; the values of ``off`` do not ask for it, just like the default.
    """
    return _key(kind, default, text, support="results", feature=feature, off=off)


def _part(model: type[Section], text: str) -> Key:
    return model, Field(default_factory=model, description=text)


def _model(
    name: str, level: Level, text: str, *, switch: str = "", is_open: bool = False, **keys: Any
) -> Any:
    """Make the model of a section; while its ``switch`` has its default, its other keys say nothing."""
    base = OpenSection if is_open else Section
    made: Any = create_model(name, __base__=base, __module__=__name__, __doc__=text, **keys)
    made.level = level
    made.gate = switch
    return made


def _feature(name: str, text: str, level: Level = "results", **keys: Any) -> Any:
    """Make a section of which only the switch is checked, and ``keys``."""
    enabled = _key(Bool, False, "Use the feature.")
    return _model(name, level, text, switch="enabled", is_open=True, enabled=enabled, **keys)


# fmt: off
_FEATURE = _feature("Feature", "Not supported: enabling it is an error. Other keys are not checked.")
_TOOL = _feature("Tool", "Not supported: ignored with a warning. Other keys are not checked.", "speed")
_THROUGHPUT = _model("Throughput", "speed", "Throughput timer.",
    enabled=_key(Bool, True, "Measure throughput."),
    synchronized=_key(Bool, True, "Synchronize the device for exact times."),
)
_TIMERS = _model("Timers", "supported", "Timers.", throughput=_part(_THROUGHPUT, "Throughput timer."))
_ELASTICITY = _model(
    "Elasticity",
    "results",
    "Batch sizes that work with many numbers of GPUs.",
    switch="enabled",
    enabled=_key(Bool, False, "Choose the batch sizes."),
    max_train_batch_size=_key(Count, 2000, "Maximum batch size."),
    micro_batch_sizes=_key(list[Count], [2, 4, 6], "Candidate micro-batch sizes."),
    min_gpus=_key(Count, 1, "Minimum number of GPUs."),
    max_gpus=_key(Count, 10000, "Maximum number of GPUs."),
    min_time=_key(Whole, 0, "Minimum run time, in minutes."),
    prefer_larger_batch=_key(Bool, True, "Prefer the larger of two equal batches."),
    ignore_non_elastic_batch_info=_key(Bool, False, "Ignore the batch keys instead of failing."),
    version=_key(NonNegative, 0.2, "Version of the algorithm."),
    model_parallel_size=_key(Count, 1, "Model-parallel size."),
    num_gpus_per_node=_key(Count, 1, "GPUs per node."),
)
_METRICS = Literal["latency", "throughput", "flops", "forward", "backward", "step"]
_AUTOTUNING = _model("Autotuning", "speed", "Search for a fast config.", switch="enabled",
    enabled=_key(Bool, False, "Search for a fast config."),
    fast=_key(Bool, True, "Tune only the micro-batch size and the ZeRO stage."),
    results_dir=_key(str, "autotuning_results", "Folder for results."),
    exps_dir=_key(str, "autotuning_exps", "Folder for experiments."),
    overwrite=_key(Bool, True, "Rerun finished experiments."),
    start_profile_step=_key(Count, 3, "First measured step."),
    end_profile_step=_key(Count, 5, "Last measured step."),
    metric=_key(_METRICS, "throughput", "Metric to optimize."),
    metric_path=_key(str, None, "File with the metric."),
    tuner_type=_key(Literal["gridsearch", "random", "model_based"], "gridsearch", "Search algorithm."),
    tuner_early_stopping=_key(Whole, 5, "Experiments without improvement before stopping."),
    tuner_num_trials=_key(Count, 50, "Maximum number of experiments."),
    max_train_batch_size=_key(Count, None, "Maximum batch size."),
    min_train_batch_size=_key(Count, 1, "Minimum batch size."),
    max_train_micro_batch_size_per_gpu=_key(Count, 1024, "Maximum micro-batch size."),
    min_train_micro_batch_size_per_gpu=_key(Count, 1, "Minimum micro-batch size."),
    num_tuning_micro_batch_sizes=_key(Count, 3, "Number of micro-batch sizes to try."),
    mp_size=_key(Count, 1, "Model-parallel size."),
    arg_mappings=_key(_JSON, None, "Script arguments that correspond to config keys."),
)
_EIGENVALUE = _feature("Eigenvalue", "Largest eigenvalues of the layers, for quantization.",
    max_iter=_key(Count, 100, "Maximum iterations."),
    tol=_key(NonNegative, 1e-2, "Tolerance."),
    stability=_key(NonNegative, 1e-6, "Added for numerical stability."),
    gas_boundary_resolution=_key(Count, 1, "Steps between estimates."),
)
_LAYER_DROP = _feature("ProgressiveLayerDrop", "Drop layers during training.",
    theta=_key(Fraction, 1.0, "Fraction of layers to keep."),
    gamma=_key(NonNegative, 0.001, "Decay rate."),
)
_TENSOR_PARALLEL_RANKS = _model("TensorParallelRanks", "results", "Tensor parallelism of inference engines.",
    tp_size=_refused(Count, 1, "Group size.",
        feature="inference engines (to train, use tensor_parallel.autotp_size)"),
    tp_grain_size=_ignored(Count, 64, "Split layers at multiples of this many elements."),
)
_ZENFLOW = _model("ZenFlow", "results", "Asynchronous updates of the less important gradients on the CPU.",
    topk_ratio=_key(Fraction, 0.1, "Fraction of gradients to update on the GPU immediately."),
    select_strategy=_key(Literal["auto", "step", "epoch"], "auto",
        "When to reselect the important columns."),
    select_interval=_key(AutoInt, "auto", "Interval for reselecting the important columns."),
    update_interval=_key(AutoInt, "auto", "Interval for updating the other gradients."),
    overlap_step=_key(Bool, False, "Overlap the CPU step with the next forward and backward passes."),
    offload=_key(Bool, False, "Keep the selected state on the CPU too."),
    auto_ratio=_key(Fraction, 0.99, "Threshold used by the automatic update interval."),
    full_warm_up_rounds=_key(Whole, 0, "Initial steps that update all gradients."),
    pt_reserved_cores_perc=_key(Fraction, 0.5, "Fraction of CPU cores reserved for PyTorch."),
)
_PARALLEL_WRITE = _model("ParallelWrite", "speed", "Write a checkpoint from several ranks.",
    pipeline_stage=_key(Bool, False, "Write pipeline stages in parallel."),
)

_EXPERT_LAYER: dict[str, Any] = {
    "preset_model": None,
    "moe_layer_pattern": None,
    "expert_pattern": None,
    "router_pattern": None,
    "route_norm": None,
    "route_scale": 1.0,
    "score_apply": "auto",
    "num_expert_groups": None,
    "num_limited_groups": None,
    "score_func": "auto",
    "top_k": "auto",
    "routed_scaling_factor": "auto",
    "expert_w1": None,
    "expert_w2": None,
    "num_experts_attr": None,
    "top_k_attr": None,
    "has_shared_experts": None,
    "shared_experts_pattern": None,
    "shared_experts_gate_pattern": None,
    "expert_activation": None,
}

MISSING: dict[str, dict[str, Key]] = {
    "pipeline": {
        "seed_layers": _ignored(Bool, False, "Seed each layer: DeepSpeed reads PipelineModule's alone."),
        "pipe_partitioned": _ignored(Bool, True, "Shard activations between stages."),
        "grad_partitioned": _ignored(Bool, True, "Shard gradients between stages."),
    },
    "expert_parallel": {
        "expert_tensor_parallel_size": _refused(Count, 1, "Tensor-parallel size inside each expert.",
            feature="a separate tensor-parallel axis for experts (use tensor_parallel)"),
        "validate_folding_routing": _ignored(Bool, False, "Check the routing of tensor-parallel ranks."),
        "async_split_plan": _ignored(Bool, False, "Overlap the exchange of token counts with computation."),
        "use_grouped_mm": _ignored(Bool, True, "Use grouped matrix products (see experts_implementation)."),
        "disable_triton_grouped_mm": _ignored(Bool, False, "Do not use Triton kernels."),
        "combine_impl": _ignored(Any, "auto", "Implementation of the output sum."),
        "row_weighting_impl": _ignored(Any, "auto", "Implementation of the output weighting."),
        "gate_up_impl": _ignored(Any, "separate", "Implementation of the gate and up projections."),
        "comm_backend": _ignored(Any, "comm", "Backend of the token exchange."),
        "comm_num_sm": _ignored(Count, 12, "Streaming multiprocessors for the token exchange."),
        "comm_qp_margin": _ignored(Count, 4, "Queue pairs for the token exchange."),
        "comm_max_tokens_per_rank": _ignored(Whole, 0, "Maximum tokens per rank in the exchange buffer."),
        **{
            name: _refused(Any, default, "DeepSpeed's description of an expert layer.",
                feature="expert layer descriptions (name the modules in expert_parallel.experts)")
            for name, default in _EXPERT_LAYER.items()
        },
    },
    "compile": {
        "deepcompile": _ignored(Bool, False, "Rewrite compiled graphs for ZeRO."),
        "free_activation": _ignored(Bool, False, "Free activations early."),
        "free_activation_threshold": _ignored(Size, 10 * 1024 * 1024,
            "Smallest activation freed early, in bytes."),
        "offload_activation": _ignored(Bool, False, "Offload activations."),
        "offload_activation_pin_memory": _ignored(Bool, True, "Use pinned memory for offloaded activations."),
        "offload_opt_states": _ignored(Bool, False, "Offload optimizer state."),
        "double_buffer": _ignored(Bool, True, "Use two reduce buffers."),
        "symmetric_memory": _ignored(Bool, False, "Use symmetric memory."),
        "debug_log": _ignored(Bool, False, "Write debug logs."),
        "offload_parameters": _ignored(Bool, False, "Offload parameters."),
        "sync_before_reduce": _ignored(Bool, False, "Synchronize before each reduce."),
        "sync_after_reduce": _ignored(Bool, False, "Synchronize after each reduce."),
        "sync_before_allgather": _ignored(Bool, False, "Synchronize before each all-gather."),
        "sync_after_allgather": _ignored(Bool, False, "Synchronize after each all-gather."),
        "keep_int_input_tensors": _ignored(Bool, True, "Keep integer inputs."),
        "keep_all_input_tensors": _ignored(Bool, False, "Keep all inputs."),
        "passes": _ignored(list[str], None, "Graph passes; null is DeepSpeed's own list."),
    },
    "tensor_parallel": {
        "tp_overlap_comm": _ignored(Bool, False, "Overlap collectives with computation."),
        "tp": _part(_TENSOR_PARALLEL_RANKS, "DeepSpeed's section for inference."),
        "tp_grain_size": _ignored(Count, 64, "Split layers at multiples of this many elements."),
        "preset_model": _ignored(str, None,
            "DeepSpeed's plan for a model family. The model's own is used, with the same results."),
        "vocab_parallel_lm_head": _ignored(Bool, None,
            "Split the head by the vocabulary. The model's own plan says whether it is split."),
        "vocab_parallel_ce_backend": _ignored(str, "torch", "Implementation of the loss of such a head."),
        "injection_policy_tuple": _refused(Any, None, "Layers whose outputs are all-reduced.",
            feature="injection policies (use tensor_parallel.plan)"),
        "keep_module_on_host": _ignored(Bool, False, "Keep modules in host memory while splitting them."),
        "replace_with_kernel_inject": _refused(Bool, False, "Replace layers with fused kernels.",
            feature="kernel injection"),
    },
    "": {
        "sparse_gradients": _ignored(Bool, False, "Reduce embedding gradients sparsely."),
        "seq_parallel_communication_data_type": _ignored(Dtype, "fp32",
            "Data type of sequence-parallel communication."),
        "disable_allgather": _ignored(Bool, False, "Broadcast updated parameters instead of all-gathers."),
        "graph_harvesting": _ignored(Bool, False, "Record the optimizer step in a CUDA graph."),
        "vocabulary_size": _ignored(Count, None, "Vocabulary size, for alignment."),
        "use_data_before_expert_parallelism": _refused(Bool, False, "Order of the ranks in expert groups.",
            feature="a different rank order"),
        "timers": _part(_TIMERS, "Timers."),
        "elasticity": _part(_ELASTICITY, "Elastic batch sizes."),
        "autotuning": _part(_AUTOTUNING, "Autotuning."),
        "eigenvalue": _part(_EIGENVALUE, "Eigenvalues."),
        "progressive_layer_drop": _part(_LAYER_DROP, "Progressive layer drop."),
        "curriculum_learning": _part(_FEATURE, "Curriculum learning."),
        "data_efficiency": _part(_FEATURE, "Data efficiency."),
        "hybrid_engine": _part(_FEATURE, "Hybrid engine."),
        "msamp": _part(_FEATURE, "MS-AMP."),
        "nebula": _part(_TOOL, "Nebula checkpoints."),
        "sparse_attention": _refused(_JSON, None, "Sparse attention.", feature="sparse attention"),
        "compression_training": _refused(_JSON, None, "Compression.", feature="compression"),
        "quantize_training": _refused(_JSON, None, "Quantization-aware training.",
            feature="quantization-aware training"),
        "weight_quantization": _refused(_JSON, None, "Weight quantization.", feature="weight quantization"),
        "datastates_ckpt": _ignored(_JSON, None, "DataStates checkpoints."),
    },
    "optimizer": {"legacy_fusion": _ignored(Bool, False, "Use the legacy fused 16-bit optimizer.")},
    "optimizer.params": {
        "capturable": _ignored(Bool, False, "Allow capture in a CUDA graph."),
        "fp32_optimizer_states": _refused(Bool, True, "Keep the moments in fp32."),
        "freeze_step": _refused(Count, None, "Steps before a compressed optimizer freezes its variance."),
    },
    "fp16": {
        "fp16_master_weights_and_grads": _refused(Bool, False, "Keep master weights and gradients in fp16.",
            feature="fp16 master weights"),
    },
    "amp": {
        "max_loss_scale": _refused(Positive, 2.0**24, "Maximum dynamic loss scale; zlaunch has no limit.",
            feature="a maximum loss scale"),
        "num_losses": _refused(Count, 1, "Losses with separate scales.",
            feature="separate loss scales"),
        "verbosity": _ignored(Whole, 1, "Verbosity of apex."),
        "cast_model_type": _refused(Any, None, "Data type of the parameters.",
            feature="a parameter dtype (use fp16 or bf16)"),
        "patch_torch_functions": _refused(Bool, True, "Cast the inputs of operations, as O1 does.",
            feature="O1 without casts (use opt_level O0 for fp32)"),
        "keep_batchnorm_fp32": _refused(Any, None, "Batch norm's parameters in fp32, for O2.",
            feature="a setting of O2"),
        "master_weights": _refused(Bool, None, "fp32 copies of the parameters, for O2.",
            feature="a setting of O2"),
        "cast_model_outputs": _refused(Any, None, "Data type of the model's outputs.",
            feature="casting outputs (cast them in the model)"),
    },
    "aio": {"use_gds": _ignored(Bool, False, "Use GPUDirect Storage.")},
    "activation_checkpointing": {
        "contiguous_memory_optimization": _ignored(Bool, False, "Copy saved activations into one buffer."),
        "synchronize_checkpoint_boundary": _ignored(Bool, False, "Synchronize the device at each boundary."),
        "profile": _ignored(Bool, False, "Time the forward and backward passes of each segment."),
    },
    "checkpoint": {
        "load_universal": _refused(Bool, False, "Load DeepSpeed's universal format.",
            feature="DeepSpeed's universal checkpoints"),
        "parallel_write": _part(_PARALLEL_WRITE, "Parallel writing."),
    },
    "checkpoint.writer": {
        "type": _ignored(Literal["FAST", "PYTHON", "MOCK"], None, "Writer type."),
        "io_buffer_size": _ignored(Bucket, 64 * 1024 * 1024, "Size of the write buffer, in bytes."),
        "io_buffer_double": _ignored(Bool, True, "Fill one buffer while another is written."),
        "show_statistics": _ignored(Bool, False, "Print write speeds."),
        "data_parallel": _ignored(Literal["replica", "socket", "machine"], None,
            "Ranks that write in parallel."),
        "io_multiplier": _ignored(Count, 1, "Files per rank."),
    },
    "zero_optimization": {
        "zenflow": _refused(_ZENFLOW, None, "ZenFlow; an object enables it.", feature="ZenFlow"),
        "cpu_offload_use_pin_memory": _ignored(Bool, None, "Deprecated name of pin_memory."),
        "stage3_use_all_reduce_for_fetch_params": _ignored(
            Bool, False, "Fetch with all-reduce instead of all-gather.", "use_all_reduce_for_fetch_params"
        ),
        "stage3_allgather_sequential": _ignored(Bool, False, "All-gather parameters one by one.",
            "allgather_sequential"),
        "legacy_stage1": _refused(Bool, False, "DeepSpeed's legacy stage 1.",
            feature="the legacy stage 1"),
        "mics_hierarchical_params_gather": _refused(Bool, False, "Gather parameters in two steps (MiCS).",
            feature="hierarchical gathering (MiCS)"),
        "pipeline_loading_checkpoint": _ignored(Bool, False, "Pipeline the loading of a checkpoint."),
        "log_trace_cache_warnings": _ignored(Bool, False, "Log changes of the module order."),
        "enable_sanity_checks": _ignored(Bool, False, "Extra checks of gradients and parameters."),
        "save_muon_momentum_buffer_in_memory": _ignored(Bool, False, "Keep Muon's momentum in memory."),
    },
    "zero_optimization.offload_optimizer": {
        "super_offload": _ignored(Bool, False, "Use the offload engine for superchips (SuperOffload)."),
        "cpuadam_cores_perc": _ignored(Fraction, 0.8,
            "Fraction of CPU cores for the CPU optimizer."),
    },
}
"""Section -> the keys in it that nothing here does anything with."""
# fmt: on


def with_missing(path: str) -> Callable[[type[S]], type[S]]:
    """Return a decorator that adds the unsupported keys of the section at ``path`` to its model."""

    def add(model: type[S]) -> type[S]:
        fields: dict[str, Any] = MISSING[path]
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return add
