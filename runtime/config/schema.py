"""The whole config, its sections put together, and its JSON Schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema

from .fields import (
    AutoInt,
    Bool,
    Bucket,
    Count,
    Dtype,
    Integer,
    LogLevel,
    LowDtype,
    NonNegative,
    Positive,
    Power,
    Section,
    Steps,
    Whole,
    always,
    describe_fields,
    ok,
    real,
    section,
)
from .optimizers import SCHEDULER_PARAMS, Optimizer, Scheduler, optimizer_models
from .parallel import ExpertParallel, Parallel, Pipeline, TensorParallel
from .unsupported import with_missing
from .zero import Zero

# -- other sections ---------------------------------------------------------------------------------
#
# The smaller config sections: precision, disk, activations, checkpoints.


@with_missing("fp16")
class FP16(Section):
    """Half precision with loss scaling."""

    enabled: Bool = ok(False)
    """Train in fp16."""
    auto_cast: Bool = ok(False)
    """Cast floating-point inputs to fp16."""
    loss_scale: NonNegative = ok(0.0)
    """Fixed loss scale; 0 is dynamic."""
    initial_scale_power: Power = ok(16)
    """Initial dynamic loss scale, as a power of 2."""
    loss_scale_window: Count = ok(1000)
    """Steps without overflow before the scale doubles."""
    hysteresis: Count = ok(2)
    """Overflows before the scale halves."""
    consecutive_hysteresis: Bool = ok(False)
    """Reset the hysteresis after every step without overflow."""
    min_loss_scale: NonNegative = ok(1.0)
    """Minimum dynamic loss scale; 0 means 2^-126 (1.2e-38)."""


class BF16(Section):
    """bfloat16 without loss scaling."""

    enabled: Bool = ok(False)
    """Train in bf16."""
    auto_cast: Bool = ok(False)
    """Cast floating-point inputs to bf16 (zlaunch's own key)."""
    immediate_grad_update: Bool = always(False, "zlaunch accumulates them immediately", holds=True)
    """Add gradients to the fp32 buffer as soon as they are produced."""
    check_grad_overflow: Bool = ok(True, "check_overflow")
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: Bool = ok(False)
    """DeepSpeed's key for master_weights: "stochastic"."""
    bf16_optimizer_states: Bool = ok(False)
    """DeepSpeed's key for optimizer.params.state_dtype: "bf16". The optimizer must be in the config."""
    master_weights: Literal["fp32", "stochastic"] = ok("fp32")
    """Master weights of the optimizer: "fp32", or "stochastic": none, the optimizer updates the bf16 weights
    with stochastic rounding (zlaunch's own key)."""


class TorchAutocast(Section):
    """fp32 training under torch.autocast."""

    enabled: Bool = ok(False)
    """Run the engine's forward pass under torch.autocast. Excludes fp16 and amp. With the section bf16,
    parameters are bf16."""
    dtype: LowDtype = ok("bf16")
    """Compute type of operations such as matrix products: bfloat16 or float16. Without the section bf16,
    parameters, gradients and collectives stay fp32. float16 scales the loss like torch.amp.GradScaler: 65536
    at first, doubled after 2000 steps without overflow, halved at each overflow. The section fp16 has no
    effect on it."""
    lower_precision_safe_modules: list[str] | None = ok(None)
    """Classes whose parameters and gradients DeepSpeed sends in dtype. No effect in zlaunch: collectives are
    in fp32. communication_data_type sets the type of gradients."""


def _amp_scale(value: Any) -> float | str | None:
    if value is None or value == "dynamic":
        return value  # type: ignore[no-any-return]
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise ValueError('"dynamic" or a number above 0')
    return float(number)


AmpScale = Annotated[
    Literal["dynamic"] | float | None,
    BeforeValidator(_amp_scale),
    WithJsonSchema(
        {"anyOf": [{"const": "dynamic"}, {"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}
    ),
]


@with_missing("amp")
class AMP(Section):
    """Arguments of NVIDIA's apex.amp.initialize, implemented with torch.autocast."""

    gate: ClassVar[str] = "enabled"

    enabled: Bool = ok(False)
    """Train with opt_level, at any ZeRO stage. Excludes fp16, bf16 and torch_autocast."""
    opt_level: Literal["O0", "O1", "O2", "O3"] = ok("O1")
    """O0: plain fp32. O1: fp32 under torch.autocast to float16, with loss scaling. O2 and O3: errors."""
    loss_scale: AmpScale = ok(None)
    """"dynamic" or a fixed number; null is dynamic with O1, 1 with O0."""
    min_loss_scale: Positive | None = ok(None)
    """Minimum dynamic loss scale; null: 1."""


class DataTypes(Section):
    """Data types of gradients, parameters and buffers."""

    grad_accum_dtype: Dtype | None = ok(None)
    """Type in which gradients are accumulated over micro-batches: fp32 or the training dtype. With null, fp32
    for several micro-batches; the gradient of a single one keeps the type in which it was reduced.
    """
    param_dtype: Dtype | None = ok(None)
    """Type of the parameters; must agree with fp16 and bf16."""
    buffer_dtype: Dtype | None = ok(None)
    """Type of all floating-point buffers. null keeps each buffer's type, except batch and instance norm's
    running statistics and spectral norm's vectors, which get the type of the parameters."""
    keep_in_fp32_modules: list[str] | None = ok(None)
    """Patterns for names of buffers that stay fp32 under fp16 and bf16. They match anywhere in a name; * is
    any text. null: the list of the transformers model; []: none."""


@with_missing("aio")
class AIO(Section):
    """Asynchronous disk access for NVMe offload."""

    block_size: Bucket = ok(1_048_576)
    """Bytes in one request, a multiple of 4096."""
    queue_depth: Count = ok(8)
    """Concurrent requests, each in its own thread."""
    intra_op_parallelism: Count = ok(1, "thread_count")
    """Threads; zlaunch uses the larger of this and queue_depth."""
    single_submit: Bool = always(False, "each thread submits its own request")
    """Submit requests one by one."""
    overlap_events: Bool = always(True, "waiting overlaps with submitting", holds=True)
    """Overlap submitting with waiting."""


@with_missing("activation_checkpointing")
class ActivationCheckpointing(Section):
    """Recompute activations in the backward pass instead of saving them."""

    enabled: Bool = ok(False)
    """Checkpoint every transformer block of the model (zlaunch's own key)."""
    partition_activations: Bool = ok(False)
    """Shard saved activations over the model-parallel ranks passed to zlaunch.checkpointing.configure."""
    cpu_checkpointing: Bool = ok(False)
    """Store saved activations in CPU memory: of blocks (enabled) and of zlaunch.checkpointing.checkpoint."""
    number_checkpoints: Count | None = ok(None)
    """With enabled: checkpoint only this many blocks, evenly spaced; the others save all activations."""
    tiled_mlp: Bool = ok(False)
    """Compute MLPs in tiles of tokens, and recompute them in the backward pass (zlaunch's own key)."""
    chunked_loss: Bool = ok(True)
    """Compute the loss of a Hugging Face causal language model from its logits in chunks, without copies of
    all logits in float32; also with vocab_parallel_loss (zlaunch's own key)."""
    tiled_loss: Bool = ok(False)
    """Compute a Hugging Face model's loss in tiles of tokens, without the full logits. In training, the model
    then returns no logits (zlaunch's own key)."""
    tile_tokens: AutoInt = ok("auto")
    """Tokens in one tile. "auto": for MLPs, the MLP's width; for the loss, 67 million logits (zlaunch's own
    key)."""


@with_missing("compile")
class Compile(Section):
    """torch.compile of the model's blocks."""

    enabled: Bool = ok(False)
    """Compile the forward of every transformer block; does not go with parallel axes other than data."""
    backend: str = ok("inductor")
    """Backend of torch.compile. "inductor" needs a C++ compiler, also on GPUs."""
    kwargs: dict[str, Any] = ok({})
    """More arguments of torch.compile, such as {"dynamic": true}."""


@with_missing("checkpoint.writer")
class Writer(Section):
    """How checkpoint files are written."""

    decoupled: Bool = ok(False)
    """Write in the background, like checkpoint.asynchronous."""


def _capital(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


Validation = Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capital)]


class InMemorySection(Section):
    """Snapshots in the memory of the nodes, from which a restart resumes."""

    every: Count = ok(10)
    """Optimizer steps between snapshots (zlaunch's own key)."""
    copies: Count = ok(2)
    """Copies of each rank's snapshot: 1 on its own node, 2 also on the next node (zlaunch's own key)."""


class DataLoaderSection(Section):
    """Sets how engine.dataloader and training_data read a dataset (zlaunch's own section). A DataLoader keeps
    its own options."""

    shuffle: Bool = ok(True)
    """Give the samples a new order in each epoch."""
    seed: Whole = ok(0)
    """Seed of that order."""
    drop_last: Bool = ok(False)
    """Leave out samples that do not fill a batch on every rank; also if dataloader_drop_last says so."""
    num_workers: Whole = ok(0)
    """Processes of each rank that read samples; 0 reads in the training process."""
    prefetch_factor: Count | None = ok(None)
    """Batches that each worker process, if there are any, reads in advance; null is torch's default, 2."""
    persistent_workers: Bool = ok(True)
    """Keep the worker processes between epochs."""
    pin_memory: Bool | None = ok(None)
    """Copy batches to pinned memory, from which GPUs copy faster; null does so on a GPU."""


@with_missing("checkpoint")
class CheckpointSection(Section):
    """Saving and loading."""

    asynchronous: Bool = ok(False)
    """Write checkpoints in the background from a copy in host memory (zlaunch's own key)."""
    keep_last: Count | None = ok(None)
    """Keep only the newest N tags of a numbered series, such as step100, step200 (zlaunch's own key)."""
    on_signal: Bool = ok(False)
    """Save and exit on SIGUSR1 or preemption (zlaunch's own key)."""
    in_memory: InMemorySection | None = ok(None)
    """Keep snapshots in memory, so that restarts read no disk; null: off (zlaunch's own key)."""
    save_dir: str | None = ok(None)
    """Folder for on_signal; null: the last one saved to or loaded from, else ./checkpoints (zlaunch's own
    key)."""
    use_node_local_storage: Bool = ok(False)
    """Each node saves the files of its ranks on its local disk."""
    tag_validation: Validation = ok("Warn")
    """If ranks pass different tags: Fail raises an error; Warn and Ignore use rank 0's tag."""
    checkpoint_serialization: Bool = always(True, "zlaunch pickles nothing")
    """Use torch's pickle format."""
    writer: Writer | None = ok(None)
    """The checkpoint writer; decoupled means asynchronous."""

    @property
    def is_asynchronous(self) -> bool:
        """Tell whether checkpoints are written in the background, under either key."""
        return self.asynchronous or (self.writer is not None and self.writer.decoupled)


# -- monitors ---------------------------------------------------------------------------------------
#
# The config sections that switch trackers on.


class FileMonitor(Section):
    """Metrics as TensorBoard or CSV files."""

    enabled: Bool = ok(False)
    """Write the metrics of every step."""
    output_path: str = ok("")
    """Parent folder of job_name; empty: the working directory."""
    job_name: str = ok("DeepSpeedJobName")
    """Folder of the files, inside output_path."""


class WandB(Section):
    """Metrics for Weights & Biases."""

    enabled: Bool = ok(False)
    """Log the metrics of every step to a run separate from the script's."""
    group: str | None = ok(None)
    """Run group."""
    team: str | None = ok(None)
    """Team or user."""
    project: str = ok("deepspeed")
    """Project."""


class Comet(Section):
    """Metrics for Comet."""

    enabled: Bool = ok(False)
    """Log the metrics."""
    samples_log_interval: Count = ok(100)
    """Samples between two values of a metric."""
    project: str | None = ok(None)
    """Project."""
    workspace: str | None = ok(None)
    """Workspace."""
    api_key: str | None = ok(None)
    """API key; prefer the environment variable COMET_API_KEY."""
    experiment_name: str | None = ok(None)
    """Experiment name."""
    experiment_key: str | None = ok(None)
    """Experiment key."""
    online: Bool | None = ok(None)
    """Upload during the run; false writes an archive to upload later."""
    mode: Literal["get", "create", "get_or_create"] | None = ok(None)
    """Create an experiment or continue an existing one."""


TRACKERS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""Names the sections."""


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config as plain values, its API key left out."""
    comet = config.get("comet")
    if not isinstance(comet, Mapping) or comet.get("api_key") is None:
        return dict(config)
    return {**config, "comet": {**comet, "api_key": "(left out)"}}


# -- profilers --------------------------------------------------------------------------------------
#
# The config sections of what measures a run: the FLOPS profiler, the log of collectives.


OPERATIONS: dict[str, str] = {
    **{name: name for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather")},
    **{name: name for name in ("reduce", "reduce_scatter", "scatter", "send", "recv")},
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_coalesced", "allgather_fn"), "all_gather"),
    **dict.fromkeys(("all_reduce_coalesced", "inference_all_reduce"), "all_reduce"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_fn"), "reduce_scatter"),
    **{"all_to_all_single": "all_to_all", "monitored_barrier": "barrier", "isend": "send", "irecv": "recv"},
}
"""Maps each function of deepspeed.comm that can be logged to the name under which it is."""


def _operation(value: Any) -> str:
    if not isinstance(value, str) or value not in OPERATIONS:
        raise ValueError(f"one of {', '.join(sorted(OPERATIONS))}")
    return OPERATIONS[value]


Operation = Annotated[
    str, BeforeValidator(_operation), WithJsonSchema({"type": "string", "enum": sorted(OPERATIONS)})
]


class FlopsProfilerSection(Section):
    """FLOPs of each module, counted in one micro-batch."""

    enabled: Bool = ok(False)
    """Count FLOPs on rank 0 and print them; progress lines then show TFLOPS."""
    profile_step: Count = ok(1)
    """Steps before the counted step."""
    module_depth: Integer = ok(-1)
    """Depth of the printed module tree; -1 prints all levels."""
    top_modules: Count = ok(1)
    """Modules to list at each depth, those with the most FLOPs first."""
    detailed: Bool = ok(True)
    """Print the module tree, not only the top modules."""
    output_file: str | None = ok(None)
    """Write to this file instead of printing."""
    recompute_fwd_factor: NonNegative = always(0.0, "zlaunch counts recomputation")
    """Fraction of the forward pass that is recomputed."""


class CommsLoggerSection(Section):
    """Count, time and bandwidth of collectives, by operation and size."""

    enabled: Bool = ok(False)
    """Log collectives. Rank 0 prints a table when the engine is destroyed or the process exits."""
    prof_all: Bool = ok(True)
    """Log all operations; false logs only prof_ops."""
    prof_ops: list[Operation] = ok([])
    """Operations to log with prof_all false, named as in deepspeed.comm."""
    verbose: Bool = ok(False)
    """Print a line per operation on rank 0."""
    debug: Bool = ok(False)
    """Show the call site, with separate rows for each."""


# -- schema -----------------------------------------------------------------------------------------


Json = dict[str, Any]


@with_missing("")
class Config(Section):
    """A DeepSpeed config file as zlaunch reads it."""

    strict: Bool | None = ok(None)
    """Unknown keys: true rejects all, false warns. null rejects them inside sections; at the top level it
    rejects typos, keys of another section, settings of other tools and enabled sections, and warns about the
    rest (zlaunch's own key)."""
    train_batch_size: Count | None = ok(None)
    """Samples in one optimizer step: micro-batch size * accumulation steps * data-parallel ranks."""
    train_micro_batch_size_per_gpu: Count | None = ok(None)
    """Samples in one micro-batch on one rank."""
    gradient_accumulation_steps: Count | None = ok(None)
    """Micro-batches in one optimizer step."""
    managed_gradient_accumulation: Bool = ok(True)
    """Let the engine count micro-batches, so that engine.step() updates once per gradient_accumulation_steps
    calls. With false, every engine.step() updates. backward() divides the loss by gradient_accumulation_steps
    either way; backward(scale_wrt_gas=False) does not."""
    steps_per_print: Steps | None = ok(None)
    """Steps between progress lines; null and inf print none."""
    memory_breakdown: Bool = ok(False)
    """Print rank 0's device and host memory every steps_per_print steps (null and inf: every step)."""
    memory_plan: Literal["error", "warn"] = ok("error")
    """Refuse to train if the memory plan does not fit, or warn and train. The environment variable
    ZLAUNCH_MEMORY_PLAN takes precedence (zlaunch's own key)."""
    wall_clock_breakdown: Bool = ok(False)
    """Print the time of forward, backward, step and the rest every steps_per_print steps (null and inf: every
    step), and log it to the monitors."""
    dump_state: Bool = ok(False)
    """Print the config and the engine's state at startup."""
    gradient_clipping: NonNegative = ok(1.0)
    """Maximum global L2 norm of the gradients; 0 is off."""
    prescale_gradients: Bool = ok(False)
    """Divide gradients before the reduction."""
    gradient_predivide_factor: Positive = ok(1.0)
    """Divisor used by prescale_gradients."""
    gradient_allreduce_op: Literal["mean", "sum"] = ok("mean")
    """Reduction of gradients over the ranks; stage 3 does not support "sum"."""
    loss_reduction: Literal["mean", "tokens"] = ok("mean")
    """Weight of a micro-batch's loss in a step: "mean" gives all micro-batches of all ranks the same weight;
    "tokens" weights each by the num_tokens that the script passes to engine.backward(), so that every token
    counts the same (zlaunch's own key)."""
    communication_data_type: Dtype | None = ok(None)
    """Data type for gradient reduction; null is the model's."""
    zero_allow_untested_optimizer: Bool = ok(False)
    """Allow an optimizer that zlaunch does not know to be element-wise on flat shards. Without it, such an
    optimizer works only at stage 0 or on one rank."""
    zero_force_ds_cpu_optimizer: Bool = ok(True)
    """Let accelerate and the Trainer replace your optimizer by Adam with offload_optimizer. With false they
    keep it. zlaunch itself replaces none."""
    sequence_parallel_size: Count = ok(1)
    """Size of the sequence-parallel group, which splits each sequence, and the heads inside attention."""
    data_parallel_size: Count | None = ok(None)
    """Alias for parallel.data; null is "auto"."""
    dataloader_drop_last: Bool = ok(False)
    """Drop the last batch if it is incomplete."""
    disable_python_gc: Bool = ok(False)
    """Collect Python's garbage once, and then only when the script calls gc.collect(), until the engine is
    destroyed: a collection on one rank makes all others wait."""
    tf32: Bool | None = ok(None)
    """Allow TF32 in fp32 matrix products and convolutions on GPUs, for the whole process. null keeps the
    setting of torch, the script or Hugging Face's TrainingArguments (zlaunch's own key)."""
    log_level: LogLevel | None = ok(None)
    """Minimum level of the messages of zlaunch and of the DeepSpeed logger: debug, info, warning, error or
    critical."""

    optimizer: Optimizer | None = ok(None)
    """The optimizer."""
    scheduler: Scheduler | None = ok(None)
    """The learning-rate schedule."""
    zero_optimization: Zero = section(Zero)
    """ZeRO."""
    parallel: Parallel = section(Parallel)
    """The mesh of ranks."""
    tensor_parallel: TensorParallel = section(TensorParallel)
    """Tensor parallelism."""
    fp16: FP16 = section(FP16)
    """fp16."""
    bf16: BF16 = section(BF16, "bfloat16")
    """bf16."""
    torch_autocast: TorchAutocast = section(TorchAutocast)
    """torch.autocast."""
    amp: AMP = section(AMP)
    """NVIDIA apex."""
    data_types: DataTypes = section(DataTypes)
    """Types."""
    aio: AIO = section(AIO)
    """Disk access."""
    activation_checkpointing: ActivationCheckpointing = section(ActivationCheckpointing)
    """Activation checkpointing."""
    compile: Compile = section(Compile)
    """torch.compile."""
    expert_parallel: ExpertParallel = section(ExpertParallel)
    """Expert parallelism."""
    pipeline: Pipeline = section(Pipeline)
    """Pipeline parallelism."""
    data_loader: DataLoaderSection = section(DataLoaderSection)
    """Data."""
    checkpoint: CheckpointSection = section(CheckpointSection)
    """Checkpoints."""
    tensorboard: FileMonitor = section(FileMonitor)
    """TensorBoard."""
    csv_monitor: FileMonitor = section(FileMonitor)
    """CSV files, one per metric."""
    wandb: WandB = section(WandB)
    """Weights & Biases."""
    comet: Comet = section(Comet)
    """Comet."""
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection)
    """FLOPs of each module."""
    comms_logger: CommsLoggerSection = section(CommsLoggerSection)
    """Log of collectives."""

    @property
    def accumulates(self) -> bool:
        """Tell whether an optimizer step may have several backward passes."""
        return not self.managed_gradient_accumulation or int(self.gradient_accumulation_steps or 1) > 1

    @property
    def autocast(self) -> tuple[Literal["fp16", "bf16"] | None, float, float]:
        """Return what forward passes in fp32 cast to, None for nothing, by torch_autocast or amp; what losses
        are multiplied with, 0 for a dynamic scale; and the least such.
        """
        dtype = self.torch_autocast.dtype if self.torch_autocast.enabled else None
        if self.amp.enabled and self.amp.opt_level == "O1":
            dtype = "fp16"
        given = self.amp.loss_scale if self.amp.enabled else None
        if given is None:
            given = "dynamic" if dtype == "fp16" else 1.0
        return dtype, 0.0 if given == "dynamic" else given, self.amp.min_loss_scale or 1.0


EDITOR_KEY = "$schema"
"""Key of a config that tells editors where its JSON Schema is; it changes nothing else."""


def json_schema() -> Json:
    """Return the JSON Schema of a config file, with aliases and "auto" allowed."""
    schema = Config.model_json_schema()
    definitions: Json = schema["$defs"]
    for model in {*optimizer_models().values(), *SCHEDULER_PARAMS.values()}:
        definitions[model.__name__] = model.model_json_schema()
    models = _models_by_name(Section)
    for name, part in (("Config", schema), *definitions.items()):
        properties = part["properties"]
        described = describe_fields(models[name])
        for key, prop in list(properties.items()):
            if key in described:
                prop["description"] = described[key]
            aliases = prop.pop("aliases", [])
            for ours in ("feature", "off", "why", "holds"):
                prop.pop(ours, None)
            properties[key] = _with_auto(prop)
            properties |= dict.fromkeys(aliases, properties[key])
    for name, by_type in (("Optimizer", optimizer_models()), ("Scheduler", SCHEDULER_PARAMS)):
        definitions[name]["allOf"] = [
            {
                "if": {"properties": {"type": {"const": kind}}, "required": ["type"]},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{model.__name__}"}}},
            }
            for kind, model in by_type.items()
        ]
    schema["properties"][EDITOR_KEY] = {"type": "string", "description": "where editors find this schema"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _models_by_name(model: type[Section]) -> dict[str, type[Section]]:
    """Return all models derived from one; of two with a name, the one that is derived from the other."""
    found: dict[str, type[Section]] = {}
    for derived in model.__subclasses__():
        found[derived.__name__] = derived
        found |= _models_by_name(derived)
    return found


def _with_auto(prop: Json) -> Json:
    """Let a plain value also be "auto"."""
    kept: Json = {key: prop[key] for key in ("title", "description", "default", "support") if key in prop}
    inner = {key: value for key, value in prop.items() if key not in kept}
    choices: list[Json] = inner["anyOf"] if list(inner) == ["anyOf"] else [inner]
    for choice in choices:
        text_allowed = not choice or choice == {"type": "string"}
        if text_allowed or "$ref" in choice or choice.get("type") == "object":
            return prop
        if "auto" in choice.get("enum", ()) or choice.get("const") == "auto":
            return prop
    return {**kept, "anyOf": [*choices, {"const": "auto"}]}
