"""The `zero_optimization` section and the sections inside it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from .fields import (
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
    """Where stage 3 stores parameter shards between uses."""

    device: Device = ok("none")
    """Where to store parameter shards: none (on the GPU), cpu or nvme."""
    nvme_path: str | None = ok(None)
    """Folder on the NVMe drive. Each worker expands "~" and environment variables such as $TMPDIR."""
    buffer_count: Count = always(5, "zlaunch allocates buffers on demand")
    """Buffers for NVMe transfers."""
    buffer_size: Bucket = always(100_000_000, "each buffer fits its parameter")
    """Elements in one buffer."""
    max_in_cpu: Size = ok(1_000_000_000)
    """Parameter elements cached in CPU memory with device nvme."""
    pin_memory: Bool = ok(True)
    """Use page-locked CPU memory."""


@with_missing("zero_optimization.offload_optimizer")
class OffloadOptimizer(Section):
    """Where the optimizer state is stored and updated."""

    device: Device = ok("none")
    """Where to store optimizer state: none (on the GPU), cpu or nvme."""
    nvme_path: str | None = ok(None)
    """Folder on the NVMe drive. Each worker expands "~" and environment variables such as $TMPDIR."""
    buffer_count: Count = ok(4)
    """Tiles in host memory at the same time during the NVMe step."""
    pin_memory: Bool = ok(True)
    """Use page-locked CPU memory."""
    pipeline_read: Bool = always(False, "reads overlap with the step", holds=True)
    """Read the next tile during the step of the current tile."""
    pipeline_write: Bool = always(False, "writes overlap with the step", holds=True)
    """Write the previous tile during the step of the current tile."""
    fast_init: Bool = always(False, "zlaunch needs no extra pass", holds=True)
    """Initialise NVMe state without an extra pass."""
    ratio: Fraction = ok(1.0)
    """Fraction of the optimizer state to offload."""


class LeafModule(Section):
    """Modules that stage 3 gathers as one unit."""

    classes: Names = ok(
        [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ]
    )
    """Class names, with or without the module path."""
    names: Names = ok([])
    """Names of modules in the model."""
    name_suffixes: Names = ok([])
    """Suffixes of module names in the model."""


class LoCo(Section):
    """Error feedback for quantized gradients."""

    err_beta: Fraction = ok(0.8)
    """Decay factor of the error at each reduction, below 1."""
    reset_T: Count = ok(1024)
    """Reset a parameter's error after this many reductions."""


@with_missing("zero_optimization")
class Zero(Section):
    """ZeRO: sharding over the data-parallel ranks."""

    stage: Stage = ok(0)
    """ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters; 0 shards nothing."""
    shard_group: ShardGroupSize = ok("world")
    """Ranks to shard over: "world" (all), "node" (each node has a full replica), or a number of consecutive
    ranks. "auto": all ranks; if links between nodes are slower, parameters are gathered inside each node.
    Nodes that NVLink joins, as in NVL72, count as one."""
    mics_shard_size: Integer = ok(-1)
    """DeepSpeed's name for the size of shard_group (MiCS); -1 and 0 are off."""
    zero_hpz_partition_size: Size = ok(1)
    """Size of the groups, usually one node, that gather parameters from a secondary shard at stage 3 (ZeRO++
    hpZ); 1 and 0 are off. Optimizer state stays sharded over all ranks. At stages 1 and 2, collectives run
    inside the groups and then between them."""
    zero_quantized_weights: Bool = ok(False)
    """All-gather parameters quantized to 8 bits (ZeRO++ qwZ): between groups with hpZ, inside groups with
    MiCS, otherwise over all ranks. Ranks that share memory send nothing. Values that a script reads or saves
    are exact."""
    zero_quantized_nontrainable_weights: Bool = ok(False)
    """Like zero_quantized_weights, for frozen parameters only."""
    zero_quantized_gradients: Bool = ok(False)
    """Reduce-scatter gradients in two hops, quantized to 8 bits inside a node and 4 bits between nodes
    (ZeRO++ qgZ). CPU workers of one node share memory and do not quantize."""
    zeropp_loco_param: LoCo | None = ok(None)
    """Error feedback for quantized gradients; an object enables it."""
    contiguous_gradients: Bool = always(True, "gradients are always in buckets", holds=True)
    """Copy gradients into one bucket as they are produced."""
    reduce_scatter: Bool = always(True, "from stage 1 on, each rank receives only its own shard", holds=True)
    """Reduce-scatter gradients instead of all-reducing them."""
    reduce_bucket_size: Bucket = ok(500_000_000)
    """Stages 0 to 2: elements in one reduction, at most 16 million (2 million on CPU ranks). Stage 3 reduces
    each unit separately. "auto" is hidden_size squared."""
    use_multi_rank_bucket_allreduce: Bool = always(True, "each bucket is one collective", holds=True)
    """Reduce a bucket with several owners in one collective."""
    allgather_partitions: Bool = always(True, "zlaunch always uses all-gather", holds=True)
    """Gather updated parameters with all-gather."""
    allgather_bucket_size: Bucket = ok(500_000_000)
    """Stages 1 and 2: elements in one all-gather, at most 16 million (2 million on CPU ranks)."""
    overlap_comm: Bool | None = always(None, "reductions overlap with the backward pass", holds=True)
    """Reduce on a separate stream."""
    load_from_fp32_weights: Bool = ok(True)
    """Load the master weights of a checkpoint as they are; false rounds them to the data type of training."""
    elastic_checkpoint: Bool = always(False, "checkpoints load on any number of ranks", holds=True)
    """Allow loading on a different number of ranks."""
    offload_param: OffloadParam | None = ok(None)
    """Parameter offload."""
    offload_optimizer: OffloadOptimizer | None = ok(None)
    """Optimizer offload."""
    sub_group_size: Tile = ok(_TILE)
    """Elements in one tile of the offloaded optimizer step, at most 4194304. 0 is the default."""
    cpu_offload: Bool | None = ok(None)
    """Deprecated: true means offload_optimizer with device cpu."""
    cpu_offload_param: Bool | None = ok(None)
    """Deprecated: true means offload_param with device cpu."""
    stage3_prefetch_bucket_size: Size = ok(50_000_000, "prefetch_bucket_size")
    """Elements to gather ahead, at least one block; 0 gathers none. "auto" is 0.9 * hidden_size squared."""
    stage3_param_persistence_threshold: Size = ok(100_000, "param_persistence_threshold")
    """Keep parameters up to this many elements unsharded; "auto" is 10 * hidden_size."""
    stage3_model_persistence_threshold: Size = ok(MAX, "model_persistence_threshold")
    """Maximum elements of all unsharded parameters; parameters beyond it are sharded."""
    stage3_max_live_parameters: Size = ok(1_000_000_000, "max_live_parameters")
    """Maximum unsharded elements at the same time. The default is larger for a model whose blocks need it."""
    stage3_unit_size: Size = ok(0)
    """Divide blocks with more elements than this into their modules, each gathered for its own computation
    (zlaunch's own key). 0: as stage3_max_live_parameters."""
    stage3_max_reuse_distance: Size = always(
        1_000_000_000,
        "zlaunch reshards each unit after use, except the last one of the forward pass",
        "max_reuse_distance",
    )
    """Do not reshard a parameter that is used again within this many elements."""
    stage3_gather_16bit_weights_on_model_save: Bool = ok(
        False,
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
    )
    """Stage 3: let accelerate and the Trainer save the full 16-bit weights. save_16bit_model works without
    it."""
    stage3_module_granularity_threshold: Size = ok(0, "module_granularity_threshold")
    """Unshard modules with fewer elements than this together with the root, for a whole step; always below
    4096."""
    ignore_unused_parameters: Bool = ok(True)
    """false: a step fails if a parameter got no gradient on some rank; the error names the parameters."""
    step_in_backward: Bool = ok(False)
    """Stages 2 and 3, one micro-batch per step: update each unit as soon as its gradient is reduced, then
    free the gradient. A rank never holds the gradients of the whole model (zlaunch's own key)."""
    step_in_backward_clipping: Literal["previous_norm", "value"] = ok("previous_norm")
    """Norm used by gradient_clipping with step_in_backward: "previous_norm" uses the gradient norm of the
    previous step (in the first step, each unit's own norm), "value" clips each element."""
    round_robin_gradients: Bool = always(False, "every rank owns an equal slice of each bucket")
    """Assign gradients to ranks in round-robin order (stages 1 and 2)."""
    memory_efficient_linear: Bool = always(True, "no layer saves them", holds=True)
    """Do not save gathered weights for the backward pass of linear layers."""
    override_module_apply: Bool = always(True, "zero.Init gathers them", holds=True)
    """Gather parameters inside nn.Module.apply."""
    leaf_module: LeafModule = section(LeafModule)
    """Modules gathered as one unit."""
