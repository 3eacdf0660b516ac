"""Sections of tools beside the training: monitors, profilers, DeepCompile, batch and config search."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from .fields import Bool, Count, Integer, Level, NonNegative, Section, Size, Whole, ok, section


class Monitor(Section):
    """A place where metrics are written."""

    level: ClassVar[Level] = "speed"
    gate: ClassVar[str] = "enabled"

    enabled: Bool = ok(False)
    """Write metrics there."""


class FileMonitor(Monitor):
    """Metrics in files: tensorboard or CSV."""

    output_path: str = ok("")
    """Folder of the files."""
    job_name: str = ok("DeepSpeedJobName")
    """Name of the folder of this job."""


class WandB(Monitor):
    """Metrics for Weights & Biases."""

    group: str | None = ok(None)
    """Group of runs."""
    team: str | None = ok(None)
    """Team or user."""
    project: str = ok("deepspeed")
    """Project."""


class Comet(Monitor):
    """Metrics for Comet."""

    samples_log_interval: Count = ok(100)
    """Samples between two records."""
    project: str | None = ok(None)
    """Project."""
    workspace: str | None = ok(None)
    """Workspace."""
    api_key: str | None = ok(None)
    """API key; better kept in the environment."""
    experiment_name: str | None = ok(None)
    """Name of the experiment."""
    experiment_key: str | None = ok(None)
    """Key of the experiment."""
    online: Bool | None = ok(None)
    """Send while running."""
    mode: Literal["get", "create", "get_or_create"] | None = ok(None)
    """Create the experiment or go on with one."""


class FlopsProfiler(Monitor):
    """Counting operations of each module."""

    recompute_fwd_factor: NonNegative = ok(0.0)
    """Share of the forward that is recomputed."""
    profile_step: Count = ok(1)
    """Step to profile."""
    module_depth: Integer = ok(-1)
    """Depth of the printed tree; -1 is all of it."""
    top_modules: Count = ok(1)
    """Modules printed at each depth."""
    detailed: Bool = ok(True)
    """Print the tree."""
    output_file: str | None = ok(None)
    """File to write instead of printing."""


class CommsLogger(Monitor):
    """Logging each collective."""

    prof_all: Bool = ok(True)
    """Log all operations."""
    prof_ops: list[str] = ok([])
    """Operations to log."""
    verbose: Bool = ok(False)
    """Print each operation."""
    debug: Bool = ok(False)
    """Also name the caller."""


class Throughput(Section):
    """The samples-per-second timer."""

    level: ClassVar[Level] = "speed"

    enabled: Bool = ok(True)
    """Measure throughput."""
    synchronized: Bool = ok(True)
    """Synchronize the device for exact times."""


class Timers(Section):
    """Timers."""

    throughput: Throughput = section(Throughput)
    """Throughput timer."""


class Compile(Section):
    """DeepCompile."""

    level: ClassVar[Level] = "speed"
    gate: ClassVar[str] = "deepcompile"

    deepcompile: Bool = ok(False)
    """Rewrite compiled graphs for ZeRO."""
    free_activation: Bool = ok(False)
    """Free activations early."""
    free_activation_threshold: Size = ok(10 * 1024 * 1024)
    """Smallest activation freed early, in bytes."""
    offload_activation: Bool = ok(False)
    """Offload activations."""
    offload_activation_pin_memory: Bool = ok(True)
    """Use page-locked memory for them."""
    offload_opt_states: Bool = ok(False)
    """Offload optimizer state."""
    double_buffer: Bool = ok(True)
    """Use two reduce buffers."""
    symmetric_memory: Bool = ok(False)
    """Use symmetric memory."""
    debug_log: Bool = ok(False)
    """Write debug logs."""
    offload_parameters: Bool = ok(False)
    """Offload parameters."""
    sync_before_reduce: Bool = ok(False)
    """Synchronize before each reduce."""
    sync_after_reduce: Bool = ok(False)
    """Synchronize after each reduce."""
    sync_before_allgather: Bool = ok(False)
    """Synchronize before each all-gather."""
    sync_after_allgather: Bool = ok(False)
    """Synchronize after each all-gather."""
    keep_int_input_tensors: Bool = ok(True)
    """Keep integer inputs."""
    keep_all_input_tensors: Bool = ok(False)
    """Keep all inputs."""
    passes: list[str] | None = ok(None)
    """Graph passes; null is DeepSpeed's own list."""


class Elasticity(Section):
    """Choosing batch sizes that fit many numbers of GPUs."""

    level: ClassVar[Level] = "results"
    gate: ClassVar[str] = "enabled"

    enabled: Bool = ok(False)
    """Choose the batch sizes."""
    max_train_batch_size: Count = ok(2000)
    """Largest batch."""
    micro_batch_sizes: list[Count] = ok([2, 4, 6])
    """Micro batches that fit."""
    min_gpus: Count = ok(1)
    """Fewest GPUs."""
    max_gpus: Count = ok(10000)
    """Most GPUs."""
    min_time: Whole = ok(0)
    """Shortest run, in minutes."""
    prefer_larger_batch: Bool = ok(True)
    """Prefer the larger of two equal batches."""
    ignore_non_elastic_batch_info: Bool = ok(False)
    """Ignore the batch keys instead of failing."""
    version: NonNegative = ok(0.2)
    """Version of the rule."""
    model_parallel_size: Count = ok(1)
    """Model-parallel ranks."""
    num_gpus_per_node: Count = ok(1)
    """GPUs of a node."""


class Autotuning(Monitor):
    """Searching for a fast config."""

    fast: Bool = ok(True)
    """Tune only the micro batch and the stage."""
    results_dir: str = ok("autotuning_results")
    """Folder of the results."""
    exps_dir: str = ok("autotuning_exps")
    """Folder of the experiments."""
    overwrite: Bool = ok(True)
    """Run experiments again."""
    start_profile_step: Count = ok(3)
    """First measured step."""
    end_profile_step: Count = ok(5)
    """Last measured step."""
    metric: Literal["latency", "throughput", "flops", "forward", "backward", "step"] = ok("throughput")
    """What to improve."""
    metric_path: str | None = ok(None)
    """File of the metric."""
    tuner_type: Literal["gridsearch", "random", "model_based"] = ok("gridsearch")
    """Kind of search."""
    tuner_early_stopping: Whole = ok(5)
    """Experiments without gain before stopping."""
    tuner_num_trials: Count = ok(50)
    """Most experiments."""
    max_train_batch_size: Count | None = ok(None)
    """Largest batch."""
    min_train_batch_size: Count = ok(1)
    """Smallest batch."""
    max_train_micro_batch_size_per_gpu: Count = ok(1024)
    """Largest micro batch."""
    min_train_micro_batch_size_per_gpu: Count = ok(1)
    """Smallest micro batch."""
    num_tuning_micro_batch_sizes: Count = ok(3)
    """Micro batches to try."""
    mp_size: Count = ok(1)
    """Model-parallel ranks."""
    arg_mappings: dict[str, Any] | None = ok(None)
    """Script arguments that follow config keys."""
