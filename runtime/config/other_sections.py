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
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Count = ok(1000)
    """Good steps before the scale doubles."""
    hysteresis: Count = ok(2)
    """Overflows before the scale halves."""
    consecutive_hysteresis: Bool = ok(False)
    """Refill the hysteresis after every good step."""
    min_loss_scale: Positive = ok(1.0)
    """The dynamic scale never falls below this."""


@with_missing("bf16")
class BF16(Section):
    """bfloat16 without loss scaling."""

    enabled: Bool = ok(False)
    """Train in bf16."""
    immediate_grad_update: Bool = always(False, "gradients move at once", holds=True)
    """Add gradients to the fp32 buffer as soon as they are produced."""
    check_grad_overflow: Bool = ok(True, "check_overflow")
    """Skip a step whose gradients are not finite."""
    master_weights: Literal["fp32", "stochastic"] = ok("fp32")
    """The optimizer's copy of the weights: fp32; or none ("stochastic"): the bf16 weights themselves are
    stepped, and rounded up or down at random with the right mean (zlaunch's own key)."""


class TorchAutocast(Section):
    """fp32 training under torch.autocast: each operation in the type that suits it."""

    enabled: Bool = ok(False)
    """Run each forward pass of the engine under torch.autocast; not together with fp16, bf16 or amp."""
    dtype: LowDtype = ok("bf16")
    """Type that operations such as matrix products compute in: bfloat16 or float16. Parameters, gradients
    and what ranks exchange stay in fp32. float16 scales losses as torch.amp.GradScaler does: 65536 at first,
    doubled after 2000 good steps, halved at each overflow; the keys of fp16 do not count."""
    lower_precision_safe_modules: list[str] | None = ok(None)
    """Classes whose parameters and gradients DeepSpeed rounds to dtype to exchange them. No effect: nothing
    is rounded on the way (communication_data_type rounds gradients)."""


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
    """The arguments of NVIDIA's apex.amp.initialize; torch.autocast does what they ask for."""

    gate: ClassVar[str] = "enabled"

    enabled: Bool = ok(False)
    """Train by opt_level, at any ZeRO stage; not together with fp16, bf16 or torch_autocast."""
    opt_level: Literal["O0", "O1", "O2", "O3"] = ok("O1")
    """O1: fp32 under torch.autocast to float16, with loss scaling; O0: plain fp32. O2 and O3 are refused."""
    loss_scale: AmpScale = ok(None)
    """"dynamic" or a fixed number; null is dynamic with O1, 1 with O0."""
    min_loss_scale: Positive | None = ok(None)
    """The dynamic scale never falls below this; null: 1."""


class DataTypes(Section):
    """Types of the tensors that the engine keeps."""

    grad_accum_dtype: Dtype | None = ok(None)
    """Type in which gradients rest and are summed over micro-batches: fp32, which null means too, or the
    training type."""
    param_dtype: Dtype | None = ok(None)
    """Type of the parameters; must agree with fp16 and bf16."""
    buffer_dtype: Dtype | None = ok(None)
    """Type of all floating-point buffers; null: each keeps its own, but for the running statistics of batch
    and instance norm and the vectors of spectral norm, which torch wants in the parameters' type."""
    keep_in_fp32_modules: list[str] | None = ok(None)
    """Patterns, found anywhere in the name of a buffer (* is any characters), of buffers that are in fp32
    under fp16 and bf16; parameters are not affected. null: those that a transformers model lists itself; []:
    none."""


@with_missing("aio")
class AIO(Section):
    """Asynchronous disk access for NVMe offload."""

    block_size: Bucket = ok(1_048_576)
    """Bytes of one request, a multiple of 4096."""
    queue_depth: Count = ok(8)
    """Requests under way at once, each in its own thread."""
    intra_op_parallelism: Count = ok(1, "thread_count")
    """Threads; the larger of this and queue_depth is used."""
    single_submit: Bool = always(False, "each thread submits its own request")
    """Submit requests one by one."""
    overlap_events: Bool = always(True, "requests are waited for while others are submitted", holds=True)
    """Submit and wait at once."""


@with_missing("activation_checkpointing")
class ActivationCheckpointing(Section):
    """Recomputing activations in the backward pass."""

    enabled: Bool = ok(False)
    """Checkpoint every transformer block of the model, without a change to the script (zlaunch's own key)."""
    partition_activations: Bool = ok(False)
    """Shard saved activations over model-parallel ranks, where zlaunch.checkpointing.configure got some."""
    cpu_checkpointing: Bool = ok(False)
    """Keep saved activations in CPU memory, of blocks (enabled) and of zlaunch.checkpointing.checkpoint."""
    number_checkpoints: Count | None = ok(None)
    """With enabled: checkpoint only this many blocks, evenly spaced; the others keep all activations."""
    tiled_mlp: Bool = ok(False)
    """Compute MLPs in tiles of tokens, and again in the backward pass, while the model trains (zlaunch's own
    key, as the next two)."""
    tiled_loss: Bool = ok(False)
    """Compute a Hugging Face model's loss in tiles of tokens; no logits of whole sequences exist, and the
    output of a training pass has none."""
    tile_tokens: AutoInt = ok("auto")
    """Tokens of a tile; "auto": the MLP's width, and as many as make 67 million logits."""


@with_missing("checkpoint.writer")
class Writer(Section):
    """How checkpoint files are written."""

    decoupled: Bool = ok(False)
    """Write in the background, as with checkpoint.asynchronous."""


def _capital(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


Validation = Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capital)]


class InMemorySection(Section):
    """Snapshots in the nodes' memory, from which a restart goes on."""

    every: Count = ok(10)
    """Optimizer steps between two snapshots (zlaunch's own key, as the next)."""
    copies: Count = ok(2)
    """Nodes that keep each rank's part: its own, and with 2 the next one, too."""


@with_missing("checkpoint")
class CheckpointSection(Section):
    """Saving and loading."""

    asynchronous: Bool = ok(False)
    """Write checkpoints while training goes on, from a copy in host memory (zlaunch's own key)."""
    keep_last: Count | None = ok(None)
    """Keep only this many, the newest, of a folder's tags that are numbered alike (zlaunch's own key)."""
    on_signal: Bool = ok(False)
    """Save and end when the run is asked to stop by SIGUSR1 or a preemption (zlaunch's own key)."""
    in_memory: InMemorySection | None = ok(None)
    """Keep the newest state in memory, too, so that restarts need no disk; null: no (zlaunch's own key)."""
    save_dir: str | None = ok(None)
    """Where on_signal saves; null: where was last saved or loaded, or ./checkpoints (zlaunch's own key)."""
    use_node_local_storage: Bool = ok(False)
    """Each node keeps what its ranks save on its own disk."""
    tag_validation: Validation = ok("Warn")
    """Where ranks save under different tags: Fail is an error; Warn and Ignore save all under rank 0's."""
    checkpoint_serialization: Bool = always(True, "nothing is pickled")
    """Pickle a checkpoint as torch does."""
    writer: Writer | None = ok(None)
    """The checkpoint writer; with decoupled, as asynchronous."""

    @property
    def is_asynchronous(self) -> bool:
        """Tell whether checkpoints are written in the background, under either key."""
        return self.asynchronous or (self.writer is not None and self.writer.decoupled)
