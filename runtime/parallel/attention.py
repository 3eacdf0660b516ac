"""Computes attention on whole sequences with some of the heads, where each rank has a shard of each sequence.

DeepSpeed-Ulysses, arXiv 2309.14509: an exchange before attention gives each rank its heads of all tokens,
another one after it gives each its tokens with all heads.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm.axis import PASSES, Axis, Channel
from ..comm.collectives import Comm
from ..comm.process_group import open_comms, running_comm
from ..environment import read_environment
from ..errors import ParameterError
from ..log import counted
from ..zero import placeholder
from .collectives import DimExchange, all_to_all
from .collectives import total as total_over

# -- axis -------------------------------------------------------------------------------------------
#
# Defines the sequence-parallel axis.


TOKENS = Channel(
    "sequence: exchanges tokens and heads of",
    "exchanges tokens and heads of sequences in its sequence-parallel group",
    "sequence",
)
INPUT = Channel("sequence: all-gathers", "all-gathers sequences in its sequence-parallel group", "sequence")
LOSS = Channel(
    "sequence: sums the losses of", "sums the losses of sequences in its sequence-parallel group", "sequence"
)
CHECK = Channel(
    "sequence: compares batches of",
    "compares batches of sequences in its sequence-parallel group",
    "sequence checks",
)


class SequenceAxis(Axis):
    """Sequence-parallel axis, whose ranks have different shards of a sequence, with the state of a pass."""

    def __init__(self, comm: Comm) -> None:
        """Make the process group. Collective for all ranks."""
        super().__init__(comm, "sequence")
        self.make_group(PASSES)
        self.attentions = 0
        """Counts the attentions that were computed on whole sequences."""
        self.positions: Tensor | None = None
        """The positions of whole sequences, (batch or 1, tokens), in the last pass of a known model."""

    def shard(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's shard of whole sequences. Raises ParameterError for an odd length."""
        length = whole.shape[dim]
        if length % self.size:
            raise ParameterError(
                f"sequence parallelism: {length} tokens cannot be divided by {self.size} ranks: pad "
                f"sequences to a multiple of {self.size}"
            )
        step = length // self.size
        return whole.narrow(dim, self.rank * step, step)

    def gather(self, shard: Tensor) -> Tensor:
        """Return whole sequences, joined along dimension 1; without gradients."""
        return torch.cat(self.all_gather(shard.detach().contiguous(), INPUT), 1)


def current_axis() -> SequenceAxis | None:
    """Return the sequence-parallel axis of the engine whose forward or backward pass is running.

    Outside of passes, return the axis of any engine, if all axes have the same size; None if no engine has
    one. Raises ParameterError outside of passes if engines have axes of different sizes.
    """
    comm = running_comm()
    if comm is None:
        if len({each.mesh.sequence for each in open_comms}) > 1:
            raise ParameterError(
                "zlaunch.sequence was called outside a model's forward, and this process has engines with "
                "different parallel.sequence sizes: call it inside the model's forward (also split, mean "
                "and total), or destroy the other engines first"
            )
        comm = max(open_comms, key=lambda each: int(each.number), default=None)
    found: SequenceAxis | None = None if comm is None else comm.axes.get("sequence")
    return found


# -- attention --------------------------------------------------------------------------------------


_HEADS = 1
_TOKENS = 2
_early_splits: list[tuple[int, ...]] = []
"""Holds the shapes of what was to be divided before there was an engine."""
_had_engine = False
"""Tells that there has been an engine: without one now, sequences are whole."""


def heads_problem(axis_size: int, heads: int, key_heads: int) -> str:
    """Say why so many heads cannot be divided by the ranks of an axis; empty if they can."""

    def fits(n: int) -> bool:
        return heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)

    if fits(axis_size):
        return ""
    sizes = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
    return (
        f"sequence parallelism: {counted(heads, 'attention head')} and "
        f"{counted(key_heads, 'key-value head')} cannot be divided by {axis_size} ranks; "
        f"possible sizes: {sizes}"
    )


def to_heads(axis: SequenceAxis, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of whole sequences, (batch, heads / ranks, tokens, width), from its shard of
    sequences with all heads. Of fewer key-value heads than ranks, several ranks get the same.

    Raises ParameterError where heads cannot be divided.
    """
    heads = query.shape[_HEADS]
    key_heads = key.shape[_HEADS]
    if problem := heads_problem(axis.size, heads, key_heads):
        raise ParameterError(problem)
    if key_heads < axis.size:
        copies = axis.size // key_heads
        key, value = (each.repeat_interleave(copies, _HEADS) for each in (key, value))
    axis.attentions += 1
    query, key, value = all_to_all(axis, TOKENS, DimExchange(_HEADS, _TOKENS), query, key, value)
    return query, key, value


def local_heads(axis: SequenceAxis, per_head: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's heads of a tensor that has something for each head."""
    step = per_head.shape[dim] // axis.size
    return per_head.narrow(dim, axis.rank * step, step)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    inner: Callable[..., Tensor] = functional.scaled_dot_product_attention,
) -> Tensor:
    """Compute scaled_dot_product_attention on sequences that are split over ``parallel.sequence`` ranks.

    Without sequence parallelism, this calls ``inner`` directly.

    Args:
        query: This rank's shard, (batch, heads, tokens / ranks, width). The result has the same shape.
        key: Keys, like ``query``.
        value: Values, like ``query``.
        attn_mask: Mask of whole sequences, (..., tokens, tokens), with all heads, one head or no head
            dimension.
        dropout_p: As in torch, like the arguments that follow.
        inner: Function that computes the attention of this rank's heads.

    Raises:
        ParameterError: The number of heads is not divisible by the number of ranks.
    """
    axis = current_axis()
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if axis is None:
        return inner(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
    if query.dim() != 4 or query.shape[_TOKENS] != key.shape[_TOKENS]:
        raise ParameterError(
            f"sequence parallelism: attention needs (batch, heads, tokens, width) with as many queries as "
            f"keys, not {list(query.shape)} and {list(key.shape)}"
        )
    heads = query.shape[_HEADS]
    tokens = query.shape[_TOKENS] * axis.size
    query, key, value = to_heads(axis, query, key, value)
    if attn_mask is not None:
        if attn_mask.shape[-2:] != (tokens, tokens):
            raise ParameterError(
                f"sequence parallelism: attn_mask is {list(attn_mask.shape)}, but attention runs on whole "
                f"sequences of {tokens} tokens: pass a mask for all of them"
            )
        if attn_mask.dim() > 2 and attn_mask.shape[-3] == heads > 1:
            attn_mask = local_heads(axis, attn_mask, -3)
    output = inner(
        query, key, value, attn_mask, enable_gqa=enable_gqa and query.shape != key.shape, **options
    )
    (found,) = all_to_all(axis, TOKENS, DimExchange(_TOKENS, _HEADS), output)
    return found


def split(whole: Tensor, dim: int = 1) -> Tensor:
    """Return this rank's shard of whole sequences along their token dimension ``dim``.

    Without sequence parallelism, return ``whole``. Raises ParameterError if the length is not divisible by
    the number of ranks.
    """
    axis = current_axis()
    if axis is None and not _had_engine and read_environment().world_size > 1:
        _early_splits.append(tuple(whole.shape))
    return whole if axis is None else axis.shard(whole, dim)


def note_engine(*, divides: bool) -> None:
    """Note that there is an engine. Raises ParameterError if it divides sequences, and :func:`split` was
    called before there was any.
    """
    global _had_engine
    shapes = [*_early_splits]
    _early_splits[:] = []
    if divides and shapes:
        shape = list(shapes[0])
        raise ParameterError(
            f"zlaunch.sequence.split was called, with a tensor {shape}, before zlaunch.initialize, which "
            "sets the sequence-parallel size: call it afterwards"
        )
    _had_engine = True


def total(value: Tensor) -> Tensor:
    """Return the sum of ``value`` over the sequence-parallel group, differentiable.

    A mean loss is ``total(sum of this rank's losses) / total(number of losses)`` on every rank of the group.
    """
    axis = current_axis()
    return value if axis is None else total_over(value, axis, LOSS)


def mean(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the mean of ``values`` over the sequence-parallel group, differentiable.

    ``counts``, a bool tensor of the same shape, selects the values; by default, all count.
    """
    axis = current_axis()
    if counts is not None:
        return total(values.masked_fill(~counts, 0).sum()) / total(counts.sum())
    return total(values.sum()) / (values.numel() * (1 if axis is None else axis.size))


# -- masks ------------------------------------------------------------------------------------------
#
# Lets Hugging Face models make masks of whole sequences, where each rank has a shard of each.


_MADE_LOCALLY = ("or_mask_function", "and_mask_function", "block_sequence_ids", "encoder_hidden_states")


@dataclass(frozen=True, slots=True)
class WholeSequences:
    """Holds what a forward pass knows of the whole sequences."""

    length: int
    position_ids: Tensor | None
    """The positions of all tokens, (batch or 1, length), which tell documents in one row apart; None where
    the model would not ask: transformers do so without a cache alone."""


passes: list[WholeSequences] = []
"""Holds the forward passes that are going on, the innermost last."""


def wrap_mask_functions(model: nn.Module) -> bool:
    """Let the functions that make masks, where the model's modules use them, make those of whole sequences
    while a pass of :data:`passes` is going on. Tell whether there are any.
    """
    from transformers import masking_utils

    makers = {
        getattr(masking_utils, name): name
        for name in dir(masking_utils)
        if name.startswith("create_") and name.endswith("_mask")
    }
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        namespace: dict[str, Any] = vars(sys.modules[name])
        if namespace is vars(masking_utils):
            continue
        for key, value in list(namespace.items()):
            if inspect.isfunction(value) and value in makers:
                namespace[key] = _of_whole_sequences(value)
            found = found or hasattr(namespace[key], "zlaunch_wraps")
    return found


def _of_whole_sequences(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if not passes:
            return make(*args, **kwargs)
        whole = passes[-1]
        given = signature.bind(*args, **kwargs).arguments
        problems = [name for name in _MADE_LOCALLY if given.get(name) is not None]
        if given.get("past_key_values") is not None:
            problems.append("past_key_values")
        if problems:
            raise ParameterError(
                f"sequence parallelism: the model builds its masks with {problems[0]}, which is not supported"
            )
        # only the shape of the embeddings is asked for
        given["inputs_embeds"] = given["inputs_embeds"][:, :1].expand(-1, whole.length, -1)
        if given.get("position_ids") is not None:
            given["position_ids"] = whole.position_ids
        return make(**given)

    made.zlaunch_wraps = make  # type: ignore[attr-defined]  # marks what is wrapped already
    return made


# -- transformers attention -------------------------------------------------------------------------
#
# Lets the attention functions of Hugging Face models compute on whole sequences.


NOTE = "zlaunch_sequence_axis"
"""Names the attribute of modules whose attention is on whole sequences."""
_HF_HEADS = 2
_HF_TOKENS = 1
_PER_HEAD = {"s_aux": 0, "position_bias": 1}
"""Names arguments that have something for each head, with the dimension of the heads."""
_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")
_UNUSED = ("cache_position", "position_embeddings", "labels", "shift_labels", "num_items_in_batch")


class _WithGroups:
    """Stands for an attention module whose heads share key-value heads in groups of another size."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def wrap_attention_function(name: str) -> None:
    """Let a registered attention function compute on whole sequences for modules that have :data:`NOTE`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner: Any = ALL_ATTENTION_FUNCTIONS[name]
    if not hasattr(inner, "zlaunch_wraps"):
        ALL_ATTENTION_FUNCTIONS.register(name, _on_whole_sequences(inner, reads_positions="flash" in name))


def _on_whole_sequences(inner: Callable[..., Any], *, reads_positions: bool) -> Callable[..., Any]:
    @functools.wraps(inner)
    def computed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        axis: SequenceAxis | None = getattr(module, NOTE, None)
        if axis is None or not axis.is_open or not _is_divided(module):
            return inner(module, query, key, value, mask, *args, **kwargs)
        all_heads = query.shape[1]
        query, key, value = to_heads(axis, query, key, value)
        tokens = query.shape[2]
        heads = query.shape[1]
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == all_heads > 1:
            mask = local_heads(axis, mask, 1)
        groups = heads // key.shape[1]
        with_groups: Any = module
        if getattr(module, "num_key_value_groups", groups) != groups:
            with_groups = _WithGroups(module, groups)
        if not reads_positions:  # masks say all there is to say
            kwargs.pop("position_ids", None)
        options = {name: _of_whole(name, each, axis, all_heads, tokens) for name, each in kwargs.items()}
        output, weights = inner(with_groups, query, key, value, mask, *args, **options)
        (output,) = all_to_all(axis, TOKENS, DimExchange(_HF_TOKENS, _HF_HEADS), output)
        return output, weights

    computed.zlaunch_wraps = inner  # type: ignore[attr-defined]  # marks what is wrapped already
    return computed


def _is_divided(module: nn.Module) -> bool:
    """Tell whether a module is called with shards of sequences. Raises ParameterError if nobody knows."""
    if passes or placeholder.in_backward():
        return True
    if not module.training:
        return False  # an evaluation, or a generation, of whole sequences
    raise ParameterError(
        "sequence parallelism: a layer was called outside the model's forward pass: call the engine instead"
    )


def _of_whole(name: str, value: Any, axis: SequenceAxis, heads: int, tokens: int) -> Any:
    """Return an argument of attention for this rank's heads of whole sequences."""
    if not isinstance(value, Tensor) or name in _WHOLE or name in _UNUSED:
        return value
    if name in _PER_HEAD and value.shape[_PER_HEAD[name]] in (1, heads):
        dim = _PER_HEAD[name]
        return value if value.shape[dim] == 1 else local_heads(axis, value, dim)
    if name == "position_ids" and value.dim() == 2:
        return axis.gather(value)
    raise ParameterError(f"sequence parallelism: attention does not support {name} {list(value.shape)}")
