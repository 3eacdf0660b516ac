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
    """Unknown keys: true refuses all, false none (warnings); null refuses those inside sections, and at the
    top level those that are close to a key, belong elsewhere, are a setting's name in another tool, or are a
    section that is enabled (zlaunch's own key)."""
    train_batch_size: Count | None = ok(None)
    """Samples of one optimizer step: micro batch * accumulation steps * ranks."""
    train_micro_batch_size_per_gpu: Count | None = ok(None)
    """Samples of one forward pass on one rank."""
    gradient_accumulation_steps: Count | None = ok(None)
    """Forward and backward passes of one optimizer step."""
    managed_gradient_accumulation: Bool = ok(True)
    """Count the passes of a step in the engine. With false the script does: every engine.step() applies the
    gradients of the backward passes before it, whose losses are still divided by gradient_accumulation_steps
    (backward(scale_wrt_gas=False) leaves them)."""
    steps_per_print: Steps | None = ok(None)
    """Steps between two progress lines; null and inf print none."""
    memory_breakdown: Bool = ok(False)
    """Print rank 0's memory on the device and in the host every steps_per_print steps (null and inf: every
    step)."""
    wall_clock_breakdown: Bool = ok(False)
    """Print how a step's time is split into forward, backward, step and the rest, every steps_per_print steps
    (null and inf: every step), and write it to the monitors."""
    dump_state: Bool = ok(False)
    """Print the config and the engine's state at the start."""
    gradient_clipping: NonNegative = ok(1.0)
    """Largest global L2 norm of the gradients; 0 is off."""
    prescale_gradients: Bool = ok(False)
    """Divide gradients before the reduction."""
    gradient_predivide_factor: Positive = ok(1.0)
    """Divisor used by prescale_gradients."""
    gradient_allreduce_op: Literal["mean", "sum"] = ok("mean")
    """How gradients of the ranks are put together (sum: not with stage 3)."""
    communication_data_type: Dtype | None = ok(None)
    """Type in which gradients are reduced; null is the model's."""
    zero_allow_untested_optimizer: Bool = ok(False)
    """Give flat shards to an optimizer that is not known to be element-wise; without it such an
    optimizer is refused, but at stage 0 and on one rank.
    """
    zero_force_ds_cpu_optimizer: Bool = always(True, "what cannot be offloaded is refused in any case")
    """Refuse other optimizers with CPU offload."""
    sequence_parallel_size: Count = ok(1)
    """Ranks that have different parts of each sequence, and different heads inside of attention."""
    data_parallel_size: Count | None = ok(None)
    """Another name for parallel.data; null is "auto"."""
    dataloader_drop_last: Bool = ok(False)
    """Drop the last batch when it is not full."""
    tf32: Bool | None = ok(None)
    """Let fp32 products and convolutions on GPUs round their inputs to TF32 (true) or not (false), in the
    whole process; null leaves what torch, the script or Hugging Face's TrainingArguments have set (zlaunch's
    own key)."""
    log_level: LogLevel | None = ok(None)
    """Least level of the messages shown (debug, info, warning, error, critical), zlaunch's own and those of
    the DeepSpeed logger."""

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
    """NVIDIA apex's arguments."""
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
    """CSV files, one for each metric."""
    wandb: WandB = section(WandB)
    """Weights & Biases."""
    comet: Comet = section(Comet)
    """Comet."""
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection)
    """Operations of each module."""
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
