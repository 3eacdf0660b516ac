"""The `zero_optimization` section and the sections inside it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from .field_types import (
    MAX,
    Bool,
    Bucket,
    Count,
    Fraction,
    Integer,
    Section,
    Size,
    Stage,
    always,
    ok,
    real,
    section,
)
from .unsupported import with_missing

Device = Literal["none", "cpu", "nvme"]
_TILE = 1_000_000_000


def _tile(value: Any) -> Any:
    """Return the size of a tile; shipped configs write 0 where they mean the default."""
    return _TILE if real(value) == 0 else value


Tile = Annotated[Bucket, BeforeValidator(_tile), WithJsonSchema({"type": "number", "minimum": 0})]


def _group(value: Any) -> int | str:
    """Return a number of ranks, or a word for one."""
    if value in ("world", "node", "auto"):
        return str(value)
    number = real(value)
    if number is None or number != int(number) or number < 1:
        raise ValueError('"world", "node", "auto" or a whole number, 1 or more')
    return int(number)


ShardGroupSize = Annotated[
    Literal["world", "node", "auto"] | int,
    BeforeValidator(_group),
    WithJsonSchema({"anyOf": [{"enum": ["world", "node", "auto"]}, {"type": "integer", "minimum": 1}]}),
]


def _listed(value: Any) -> Any:
    """Return a string alone as a list, as DeepSpeed does."""
    return [value] if isinstance(value, str) else value


Names = Annotated[
    list[str],
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class OffloadParam(Section):
    """Where stage 3 keeps the parameters that are not in use."""

    device: Device = ok("none")
    """Where sharded parameters live: none (on the GPU), cpu or nvme."""
    nvme_path: str | None = ok(None)
    """Folder on the NVMe drive; "~" is the home folder of the user who trains."""
    buffer_count: Count = always(5, "buffers are made as they are needed")
    """Buffers for NVMe transfers."""
    buffer_size: Bucket = always(100_000_000, "a buffer has the size of what it holds: none is too small")
    """Elements of such a buffer."""
    max_in_cpu: Size = ok(1_000_000_000)
    """Parameter elements kept in CPU memory when the device is nvme."""
    pin_memory: Bool = ok(True)
    """Use page-locked CPU memory."""


@with_missing("zero_optimization.offload_optimizer")
class OffloadOptimizer(Section):
    """Where the optimizer state lives and steps."""

    device: Device = ok("none")
    """Where optimizer state lives: none (on the GPU), cpu or nvme."""
    nvme_path: str | None = ok(None)
    """Folder on the NVMe drive; "~" is the home folder of the user who trains."""
    buffer_count: Count = ok(4)
    """Tiles in host memory at once while NVMe state is updated."""
    pin_memory: Bool = ok(True)
    """Use page-locked CPU memory."""
    pipeline_read: Bool = always(False, "reading goes on during a step", holds=True)
    """Read the next tile while the present one steps."""
    pipeline_write: Bool = always(False, "writing goes on during a step", holds=True)
    """Write the last tile while the present one steps."""
    fast_init: Bool = always(False, "there is no extra pass", holds=True)
    """Initialise NVMe state without an extra pass."""
    ratio: Fraction = ok(1.0)
    """Share of the optimizer state that is offloaded."""


class LeafModule(Section):
    """Modules that stage 3 gathers as one unit."""

    classes: Names = ok(
        [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ]
    )
    """Class names, bare or with their module."""
    names: Names = ok([])
    """Module names inside the model."""
    name_suffixes: Names = ok([])
    """Endings of module names inside the model."""


class LoCo(Section):
    """Error feedback for quantized gradients."""

    err_beta: Fraction = ok(0.8)
    """The part of the old error that is kept at each reduction, below 1."""
    reset_T: Count = ok(1024)
    """Reductions of a parameter after which its error is forgotten."""


@with_missing("zero_optimization")
class Zero(Section):
    """What is sharded over the data-parallel ranks, and how it moves."""

    stage: Stage = ok(0)
    """0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    shard_group: ShardGroupSize = ok("world")
    """Ranks that a unit is sharded over: "world" (all), "node" (those of a node; each node keeps everything),
    a number of neighbouring ranks, or "auto": all, with parameters gathered inside the nodes where the links
    between them are slower."""
    mics_shard_size: Integer = ok(-1)
    """Names the size of shard_group as DeepSpeed does (MiCS); -1 and 0 are off."""
    zero_hpz_partition_size: Size = ok(1)
    """Ranks, such as those of a node, that keep a second copy of stage 3's parameters in common and gather
    from it (ZeRO++ hpZ); 1 and 0 are off. The optimizer stays sharded over all. At stages 1 and 2, gathers
    and reductions go inside the groups and then between them."""
    zero_quantized_weights: Bool = ok(False)
    """Gather parameters for a pass in blocks of 8 bits (ZeRO++ qwZ): between groups with hpZ, inside of them
    with MiCS, else between all ranks; ranks that share memory send nothing. What a script reads or saves is
    exact."""
    zero_quantized_nontrainable_weights: Bool = ok(False)
    """The same, for frozen parameters alone."""
    zero_quantized_gradients: Bool = ok(False)
    """Reduce gradients in blocks of 8 bits in a node and of 4 between nodes, in two hops (ZeRO++ qgZ). CPU
    workers of a node read each other's memory, where nothing is packed."""
    zeropp_loco_param: LoCo | None = ok(None)
    """Error feedback for quantized gradients; being present switches it on."""
    contiguous_gradients: Bool = always(True, "gradients have no other place", holds=True)
    """Copy gradients into one bucket as they are produced."""
    reduce_scatter: Bool = always(True, "from stage 1 on no rank gets what it does not own", holds=True)
    """Reduce each gradient only to its owner instead of to all ranks."""
    reduce_bucket_size: Bucket = ok(500_000_000)
    """Stages 0 to 2: neighbouring blocks are reduced together up to this many elements (16 million at most, 2
    million on CPU ranks); stage 3 reduces block by block. "auto" is hidden_size squared."""
    use_multi_rank_bucket_allreduce: Bool = always(True, "a bucket is reduced in one call", holds=True)
    """Reduce a bucket in one call although it has several owners."""
    allgather_partitions: Bool = always(True, "there is no other way", holds=True)
    """Gather updated parameters with all-gather."""
    allgather_bucket_size: Bucket = ok(500_000_000)
    """Stages 1 and 2: neighbouring blocks are gathered together up to this many elements (16 million at most,
    2 million on CPU ranks)."""
    overlap_comm: Bool | None = always(None, "reductions run beside the backward pass", holds=True)
    """Reduce on a side stream."""
    elastic_checkpoint: Bool = always(False, "any number of ranks loads any checkpoint", holds=True)
    """Allow loading on another number of ranks."""
    offload_param: OffloadParam | None = ok(None)
    """Parameter offload."""
    offload_optimizer: OffloadOptimizer | None = ok(None)
    """Optimizer offload."""
    sub_group_size: Tile = ok(_TILE)
    """Elements of a rank's shard in one tile of an offloaded optimizer step; at most 4194304. 0 is the
    default."""
    cpu_offload: Bool | None = ok(None)
    """Old spelling: true is offload_optimizer with device cpu."""
    cpu_offload_param: Bool | None = ok(None)
    """Old spelling: true is offload_param with device cpu."""
    stage3_prefetch_bucket_size: Size = ok(50_000_000, "prefetch_bucket_size")
    """Elements gathered ahead of use; "auto" is 0.9 * hidden_size squared."""
    stage3_param_persistence_threshold: Size = ok(100_000, "param_persistence_threshold")
    """Parameters up to this size are never sharded; "auto" is 10 * hidden_size."""
    stage3_model_persistence_threshold: Size = ok(MAX, "model_persistence_threshold")
    """Upper bound of all never-sharded parameters together; a block that would exceed it is sharded."""
    stage3_max_live_parameters: Size = ok(1_000_000_000, "max_live_parameters")
    """Gathered elements alive at once."""
    stage3_max_reuse_distance: Size = always(
        1_000_000_000,
        "a block is freed after each use, but for the last of the forward pass",
        "max_reuse_distance",
    )
    """Keep a parameter gathered if it is used again within this many elements."""
    stage3_gather_16bit_weights_on_model_save: Bool = ok(
        False,
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
    )
    """Stage 3: accelerate and the Trainer save whole 16-bit weights only with this; save_16bit_model always
    does."""
    stage3_module_granularity_threshold: Size = ok(0, "module_granularity_threshold")
    """Blocks smaller than this, and all smaller than 4096 elements, are fetched with the root, for a whole
    step."""
    ignore_unused_parameters: Bool = ok(True)
    """False: a step fails, naming them, when parameters have got no gradient on some rank."""
    step_in_backward: Bool = ok(False)
    """Stages 2 and 3, one micro-batch a step: step each unit as soon as its gradient is reduced, and give its
    memory back, so that a rank never has the gradients of the whole model. Not a key of DeepSpeed."""
    step_in_backward_clipping: Literal["previous_norm", "value"] = ok("previous_norm")
    """Meaning of gradient_clipping then, since a step's norm is known at its end: "previous_norm" clips
    by the norm of the step before (in the first step each unit by its own), "value" each element."""
    round_robin_gradients: Bool = always(False, "every rank has an equal slice of every bucket")
    """Spread gradients over the ranks in turn (stages 1 and 2)."""
    memory_efficient_linear: Bool = always(True, "no layer keeps them", holds=True)
    """Do not keep gathered weights for the backward of linear layers."""
    override_module_apply: Bool = always(True, "zero.Init does it", holds=True)
    """Gather parameters inside nn.Module.apply."""
    leaf_module: LeafModule = section(LeafModule)
    """Modules gathered as one unit."""
