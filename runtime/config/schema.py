"""The whole config, its sections put together, and its JSON Schema."""

from __future__ import annotations

from typing import Any, Literal

from .field_types import (
    Bool,
    Count,
    Dtype,
    LogLevel,
    NonNegative,
    Positive,
    Section,
    Steps,
    always,
    ok,
    section,
)
from .monitors import Comet, FileMonitor, WandB
from .optimizers import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, Optimizer, Scheduler
from .other_sections import (
    AIO,
    AMP,
    BF16,
    FP16,
    ActivationCheckpointing,
    CheckpointSection,
    DataTypes,
    TorchAutocast,
)
from .parallel import ExpertParallel, Parallel, Pipeline, TensorParallel
from .profilers import CommsLoggerSection, FlopsProfilerSection
from .unsupported import with_missing
from .zero import Zero

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
    communication_data_type: Dtype | None = ok(None)
    """Data type for gradient reduction; null is the model's."""
    zero_allow_untested_optimizer: Bool = ok(False)
    """Allow an optimizer that zlaunch does not know to be element-wise on flat shards. Without it, such an
    optimizer works only at stage 0 or on one rank."""
    zero_force_ds_cpu_optimizer: Bool = always(True, "zlaunch rejects every optimizer that it cannot offload")
    """Reject other optimizers with CPU offload."""
    sequence_parallel_size: Count = ok(1)
    """Size of the sequence-parallel group, which splits each sequence, and the heads inside attention."""
    data_parallel_size: Count | None = ok(None)
    """Alias for parallel.data; null is "auto"."""
    dataloader_drop_last: Bool = ok(False)
    """Drop the last batch if it is incomplete."""
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
    expert_parallel: ExpertParallel = section(ExpertParallel)
    """Expert parallelism."""
    pipeline: Pipeline = section(Pipeline)
    """Pipeline parallelism."""
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
    for model in {*OPTIMIZER_PARAMS.values(), *SCHEDULER_PARAMS.values()}:
        definitions[model.__name__] = model.model_json_schema()
    for part in (schema, *definitions.values()):
        properties = part["properties"]
        for key, prop in list(properties.items()):
            aliases = prop.pop("aliases", [])
            for ours in ("feature", "off", "why", "holds"):
                prop.pop(ours, None)
            properties[key] = _with_auto(prop)
            properties |= dict.fromkeys(aliases, properties[key])
    for name, by_type in (("Optimizer", OPTIMIZER_PARAMS), ("Scheduler", SCHEDULER_PARAMS)):
        definitions[name]["allOf"] = [
            {
                "if": {"properties": {"type": {"const": kind}}, "required": ["type"]},
                "then": {"properties": {"params": {"$ref": f"#/$defs/{model.__name__}"}}},
            }
            for kind, model in by_type.items()
        ]
    schema["properties"][EDITOR_KEY] = {"type": "string", "description": "where editors find this schema"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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
