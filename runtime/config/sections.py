"""The smaller config sections: precision, disk, checkpoints, and features that are only recognised."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from .fields import (
    Bool,
    Bucket,
    Count,
    Dtype,
    Fraction,
    Level,
    NonNegative,
    OpenSection,
    Positive,
    Power,
    Section,
    Whole,
    always,
    ok,
    results,
    section,
    speed,
)


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
    fp16_master_weights_and_grads: Bool = results(False, feature="fp16 master weights")
    """Keep master weights and gradients in fp16."""


class BF16(Section):
    """bfloat16 without loss scaling."""

    enabled: Bool = ok(False)
    """Train in bf16."""
    immediate_grad_update: Bool = always(False, "gradients move at once", holds=True)
    """Add gradients to the fp32 buffer as soon as they are produced."""
    check_grad_overflow: Bool = ok(True, "check_overflow")
    """Skip a step whose gradients are not finite."""
    bf16_master_weights_and_grads: Bool = results(False, feature="bf16 master weights")
    """Keep master weights and gradients in bf16."""
    bf16_optimizer_states: Bool = results(False, feature="bf16 optimizer state")
    """Keep optimizer state in bf16."""


class DataTypes(Section):
    """Types of the tensors that the engine keeps."""

    grad_accum_dtype: Dtype | None = ok(None)
    """Type in which gradients are summed; only fp32 now, which null means too."""
    param_dtype: Dtype | None = ok(None)
    """Type of the parameters; must agree with fp16 and bf16."""
    buffer_dtype: Dtype | None = results(None, feature="buffers of another type")
    """Type of the buffers."""


class AIO(Section):
    """Asynchronous disk access for NVMe offload."""

    block_size: Bucket = ok(1_048_576)
    """Bytes of one request, a multiple of 4096."""
    queue_depth: Count = ok(8)
    """Requests under way at once, each in a thread of its own."""
    intra_op_parallelism: Count = ok(1, "thread_count")
    """Threads; the larger of this and queue_depth is used."""
    single_submit: Bool = always(False, "each thread submits its own request")
    """Submit requests one by one."""
    overlap_events: Bool = always(True, "requests are waited for while others are submitted", holds=True)
    """Submit and wait at once."""
    use_gds: Bool = speed(False)
    """Use GPUDirect Storage."""


class ActivationCheckpointing(Section):
    """Recomputing activations in the backward pass."""

    enabled: Bool = ok(False)
    """Checkpoint every transformer block of the model, without a change to the script (zlaunch's own key)."""
    partition_activations: Bool = ok(False)
    """Shard saved activations over model-parallel ranks, where zlaunch.checkpointing.configure got some."""
    contiguous_memory_optimization: Bool = speed(False)
    """Copy saved activations into one buffer."""
    cpu_checkpointing: Bool = ok(False)
    """Keep saved activations in CPU memory, of blocks (enabled) and of zlaunch.checkpointing.checkpoint."""
    number_checkpoints: Count | None = ok(None)
    """With enabled: checkpoint only this many blocks, evenly spaced; the others keep all activations."""
    synchronize_checkpoint_boundary: Bool = speed(False)
    """Synchronize the device at each boundary."""
    profile: Bool = speed(False)
    """Time forward and backward of each segment."""


class ParallelWrite(Section):
    """Writing a checkpoint from several ranks."""

    level: ClassVar[Level] = "speed"

    pipeline_stage: Bool = ok(False)
    """Write pipeline stages in parallel."""


class Writer(Section):
    """How checkpoint files are written."""

    type: Literal["FAST", "PYTHON", "MOCK"] | None = speed(None)
    """Kind of writer."""
    io_buffer_size: Bucket = speed(64 * 1024 * 1024)
    """Bytes of the write buffer."""
    io_buffer_double: Bool = speed(True)
    """Fill one buffer while another is written."""
    show_statistics: Bool = speed(False)
    """Print write speeds."""
    data_parallel: Literal["replica", "socket", "machine"] | None = speed(None)
    """Ranks that share the writing."""
    decoupled: Bool = ok(False)
    """Write in the background; the same as checkpoint.asynchronous."""
    io_multiplier: Count = speed(1)
    """Files for one rank."""


def _capital(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


Validation = Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capital)]


class Checkpoint(Section):
    """Saving and loading."""

    asynchronous: Bool = ok(False)
    """Write checkpoints while training goes on, from a copy in host memory (zlaunch's own key)."""
    keep_last: Count | None = ok(None)
    """Keep only this many, the newest, of a folder's tags that are numbered alike (zlaunch's own key)."""
    on_signal: Bool = ok(False)
    """Save and end when the run is asked to stop by SIGUSR1 or a preemption (zlaunch's own key)."""
    save_dir: str | None = ok(None)
    """Where on_signal saves; null: where was last saved or loaded, or ./checkpoints (zlaunch's own key)."""
    use_node_local_storage: Bool = ok(False)
    """Each node keeps what its ranks save on its own disk."""
    tag_validation: Validation = ok("Warn")
    """Where ranks save under different tags: Fail is an error; Warn and Ignore save all under rank 0's."""
    load_universal: Bool = results(False, feature="DeepSpeed's universal checkpoints")
    """Load DeepSpeed's universal format."""
    parallel_write: ParallelWrite = section(ParallelWrite)
    """Parallel writing."""
    checkpoint_serialization: Bool = always(True, "nothing is pickled")
    """Pickle a checkpoint as torch does."""
    writer: Writer | None = ok(None)
    """The checkpoint writer; with decoupled, as asynchronous."""

    @property
    def is_asynchronous(self) -> bool:
        """Under either name."""
        return self.asynchronous or (self.writer is not None and self.writer.decoupled)


class TorchAutocast(Section):
    """Mixed precision by torch.autocast."""

    level: ClassVar[Level] = "results"
    gate: ClassVar[str] = "enabled"

    enabled: Bool = ok(False)
    """Run the forward under torch.autocast."""
    dtype: Dtype | None = ok(None)
    """Type of the cast."""
    lower_precision_safe_modules: list[str] | None = ok(None)
    """Modules whose parameters are communicated in that type."""


class Feature(OpenSection):
    """A rarely used feature that would change results; its keys are not checked."""

    level: ClassVar[Level] = "results"
    gate: ClassVar[str] = "enabled"

    enabled: Bool = ok(False)
    """Use the feature."""


class Tool(Feature):
    """A rarely used tool that would not change results; its keys are not checked."""

    level: ClassVar[Level] = "speed"


class Eigenvalue(Feature):
    """Largest eigenvalues of the layers, for quantization."""

    max_iter: Count = ok(100)
    """Most iterations."""
    tol: NonNegative = ok(1e-2)
    """Tolerance."""
    stability: NonNegative = ok(1e-6)
    """Added for stability."""
    gas_boundary_resolution: Count = ok(1)
    """Steps between two estimates."""


class ProgressiveLayerDrop(Feature):
    """Dropping layers while training."""

    theta: Fraction = ok(1.0)
    """Share of the layers kept."""
    gamma: NonNegative = ok(0.001)
    """Speed of the decay."""


class TensorParallel(OpenSection):
    """Automatic tensor parallelism; other keys are not checked."""

    level: ClassVar[Level] = "results"
    gate: ClassVar[str] = "autotp_size"

    autotp_size: Whole = results(0, off=(1,))
    """Tensor-parallel ranks; 0 and 1 are off."""


class Pipeline(Section):
    """Pipeline parallelism; read only with a pipeline module, which does not exist here."""

    level: ClassVar[Level] = "speed"

    stages: Any = ok("auto")
    """Number of stages."""
    partition: str = ok("best")
    """How layers are split."""
    seed_layers: Bool = ok(False)
    """Seed each layer."""
    activation_checkpoint_interval: Whole = ok(0)
    """Layers between saved activations."""
    pipe_partitioned: Bool = ok(True)
    """Shard activations between stages."""
    grad_partitioned: Bool = ok(True)
    """Shard gradients between stages."""
