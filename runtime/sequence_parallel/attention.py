"""Computes attention on whole sequences with some of the heads, where each rank has a part of each sequence.

DeepSpeed-Ulysses, arXiv 2309.14509: an exchange before attention gives each rank its heads of all tokens,
another one after it gives each its tokens with all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..environment import read_environment
from ..errors import ParameterError
from ..log import counted
from .axis import SequenceAxis, current_axis, exchange
from .axis import total as total_over

_HEADS, _TOKENS = 1, 2
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
    """Return this rank's heads of whole sequences, (batch, heads / ranks, tokens, width), from its part of
    sequences with all heads. Of fewer key-value heads than ranks, several ranks get the same.

    Raises ParameterError where heads cannot be divided.
    """
    heads, key_heads = query.shape[_HEADS], key.shape[_HEADS]
    if problem := heads_problem(axis.size, heads, key_heads):
        raise ParameterError(problem)
    if key_heads < axis.size:
        copies = axis.size // key_heads
        key, value = (each.repeat_interleave(copies, _HEADS) for each in (key, value))
    axis.attentions += 1
    query, key, value = exchange(axis, _HEADS, _TOKENS, query, key, value)
    return query, key, value


def own_heads(axis: SequenceAxis, per_head: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's heads of a tensor that has something for each head."""
    step = per_head.shape[dim] // axis.size
    return per_head.narrow(dim, axis.position * step, step)


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
    heads, tokens = query.shape[_HEADS], query.shape[_TOKENS] * axis.size
    query, key, value = to_heads(axis, query, key, value)
    if attn_mask is not None:
        if attn_mask.shape[-2:] != (tokens, tokens):
            raise ParameterError(
                f"sequence parallelism: attn_mask is {list(attn_mask.shape)}, but attention runs on whole "
                f"sequences of {tokens} tokens: pass a mask for all of them"
            )
        if attn_mask.dim() > 2 and attn_mask.shape[-3] == heads > 1:
            attn_mask = own_heads(axis, attn_mask, -3)
    output = inner(
        query, key, value, attn_mask, enable_gqa=enable_gqa and query.shape != key.shape, **options
    )
    (found,) = exchange(axis, _TOKENS, _HEADS, output)
    return found


def split(whole: Tensor, dim: int = 1) -> Tensor:
    """Return this rank's shard of whole sequences along their token dimension ``dim``.

    Without sequence parallelism, return ``whole``. Raises ParameterError if the length is not divisible by
    the number of ranks.
    """
    axis = current_axis()
    if axis is None and not _had_engine and read_environment().world_size > 1:
        _early_splits.append(tuple(whole.shape))
    return whole if axis is None else axis.part(whole, dim)


def note_engine(*, divides: bool) -> None:
    """Note that there is an engine. Raises ParameterError if it divides sequences, and :func:`split` was
    called before there was any.
    """
    global _had_engine
    shapes, _early_splits[:] = [*_early_splits], []
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
    return value if axis is None else total_over(value, axis)


def mean(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the mean of ``values`` over the sequence-parallel group, differentiable.

    ``counts``, a bool tensor of the same shape, selects the values; by default, all count.
    """
    axis = current_axis()
    if counts is not None:
        return total(values.masked_fill(~counts, 0).sum()) / total(counts.sum())
    return total(values.sum()) / (values.numel() * (1 if axis is None else axis.size))
