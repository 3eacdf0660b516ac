"""The smaller config sections: precision, disk, activations, checkpoints."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema

from .field_types import (
    AutoInt,
    Bool,
    Bucket,
    Count,
    Dtype,
    LowDtype,
    NonNegative,
    Positive,
    Power,
    Section,
    always,
    ok,
    real,
)
from .unsupported import with_missing


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
    min_loss_scale: Positive = ok(1.0)
    """Minimum dynamic loss scale."""


@with_missing("bf16")
class BF16(Section):
    """bfloat16 without loss scaling."""

    enabled: Bool = ok(False)
    """Train in bf16."""
    immediate_grad_update: Bool = always(False, "zlaunch accumulates them immediately", holds=True)
    """Add gradients to the fp32 buffer as soon as they are produced."""
    check_grad_overflow: Bool = ok(True, "check_overflow")
    """Skip a step whose gradients are not finite."""
    master_weights: Literal["fp32", "stochastic"] = ok("fp32")
    """Master weights of the optimizer: "fp32", or "stochastic": none, the optimizer updates the bf16 weights
    with stochastic rounding (zlaunch's own key)."""


class TorchAutocast(Section):
    """fp32 training under torch.autocast."""

    enabled: Bool = ok(False)
    """Run the engine's forward pass under torch.autocast. Excludes fp16, bf16 and amp."""
    dtype: LowDtype = ok("bf16")
    """Compute type of operations such as matrix products: bfloat16 or float16. Parameters, gradients and
    collectives stay fp32. float16 scales the loss like torch.amp.GradScaler: 65536 at first, doubled after
    2000 steps without overflow, halved at each overflow. The section fp16 has no effect on it."""
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
    """Type in which gradients are accumulated over micro-batches: fp32 (also null) or the training dtype."""
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
    tiled_loss: Bool = ok(False)
    """Compute a Hugging Face model's loss in tiles of tokens, without the full logits. In training, the model
    then returns no logits (zlaunch's own key)."""
    tile_tokens: AutoInt = ok("auto")
    """Tokens in one tile. "auto": for MLPs, the MLP's width; for the loss, 67 million logits (zlaunch's own
    key)."""


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
