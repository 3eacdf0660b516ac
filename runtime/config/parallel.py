"""The `parallel`, `tensor_parallel` and `expert_parallel` sections: the axes of the mesh of ranks."""

from __future__ import annotations

from typing import Any, Literal

from .fields import AutoInt, Bool, Count, Section, Size, Whole, ok
from .unsupported import with_missing
from .zero import ShardGroupSize


class Parallel(Section):
    """The mesh of ranks: the size of each parallel axis. The sizes multiply to the number of ranks."""

    data: AutoInt = ok("auto")
    """Size of the data-parallel axis, without the expert axis; "auto": the ranks divided by the other
    axes."""
    tensor: Count = ok(1)
    """Size of the tensor-parallel group (zlaunch's key for tensor_parallel.autotp_size)."""
    expert: Count = ok(1)
    """Size of the expert-parallel group, whose ranks have different experts and different samples (zlaunch's
    key for expert_parallel.autoep_size). "auto": the largest size that divides the experts of the model and
    the data-parallel ranks of a node, or 1 where the model or another key does not allow it."""
    sequence: Count = ok(1)
    """Size of the sequence-parallel group, which splits each sequence, and the heads inside attention
    (zlaunch's key for sequence_parallel_size)."""
    pipeline: Count = ok(1)
    """Number of pipeline stages (zlaunch's key for pipeline.stages)."""
    shard_group: ShardGroupSize | None = ok(None)
    """Ranks that ZeRO shards over: an alias for zero_optimization.shard_group."""


@with_missing("tensor_parallel")
class TensorParallel(Section):
    """Tensor parallelism: splits the weights of each layer between ranks."""

    autotp_size: Whole = ok(0)
    """Size of the tensor-parallel group; 0 and 1 turn it off."""
    plan: dict[str, str] | None = ok(None)
    """Style by module or parameter name, "*" for any number, such as {"layers.*.mlp.up": "colwise"}. null
    uses the plan of the Hugging Face model (zlaunch's own key)."""
    partition_config: dict[str, Any] | None = ok(None)
    """DeepSpeed's form of the plan: {"layer_specs": [{"patterns": [".*\\\\.o_proj\\\\.weight$"],
    "partition_type": "row"}, ...]}, regular expressions for names of weights. Layers that none matches are
    not split. Excludes plan."""
    sequence_parallel: Bool = ok(False)
    """Divide the tokens between the ranks of the group at norms and residual sums: Megatron-LM's sequence
    parallelism, for 19 families of Hugging Face models (zlaunch's own key)."""
    vocab_parallel_loss: Bool = ok(False)
    """Compute a Hugging Face model's loss from sharded logits, without gathering them. The model then returns
    only the rank's shard of the logits (zlaunch's own key)."""


@with_missing("expert_parallel")
class ExpertParallel(Section):
    """Expert parallelism: each rank of the group has different experts."""

    enabled: Bool = ok(False)
    """Enable autoep_size, as in DeepSpeed."""
    autoep_size: Count = ok(1)
    """Size of the expert-parallel group; "auto" as in parallel.expert."""
    experts: list[str] | None = ok(None)
    """Names of the modules that hold the experts, "*" for any number, such as ["layers.*.experts"]. The first
    dimension of each of their parameters is the expert. The model calls them as module(tokens (n, width),
    experts (n, k), weights (n, k)). null uses the plan of the Hugging Face model (zlaunch's own key)."""


@with_missing("pipeline")
class Pipeline(Section):
    """Pipeline parallelism: each stage has different layers and sends its activations to the next stage.
    gradient_accumulation_steps is the number of micro-batches of a step."""

    stages: AutoInt = ok("auto")
    """Number of pipeline stages; "auto" is parallel.pipeline."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = ok("1f1b")
    """Pipeline schedule: "gpipe" runs all forward passes first, "1f1b" runs each backward pass as early as
    possible, "interleaved" is 1f1b with several virtual stages on each rank (zlaunch's own key)."""
    virtual_stages: Count = ok(2)
    """With "interleaved": virtual stages on each rank (zlaunch's own key)."""
    activation_checkpoint_interval: Size = ok(0)
    """Above 0, the backward pass recomputes each layer, as with activation_checkpointing.enabled."""
    partition: Literal["best", "parameters", "uniform"] | list[Whole] = ok("best")
    """Assignment of layers to stages: "best" and "parameters" balance parameters, "uniform" balances
    layers. A list gives the first layer of each stage after the first."""
