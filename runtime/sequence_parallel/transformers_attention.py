"""Lets the attention functions of Hugging Face models compute on whole sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import ParameterError
from ..zero import placeholder
from .attention import own_heads, to_heads
from .axis import SequenceAxis, exchange
from .masks import passes

NOTE = "zlaunch_sequence_axis"
"""Names the attribute of modules whose attention is on whole sequences."""
_HEADS, _TOKENS = 2, 1
_PER_HEAD = {"s_aux": 0, "position_bias": 1}
"""Names arguments that have something for each head, with the dimension of the heads."""
_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")
_UNUSED = ("cache_position", "position_embeddings", "labels", "shift_labels", "num_items_in_batch")


class _WithGroups:
    """Stands for an attention module whose heads share key-value heads in groups of another size."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

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
        tokens, heads = query.shape[2], query.shape[1]
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == all_heads > 1:
            mask = own_heads(axis, mask, 1)
        groups = heads // key.shape[1]
        with_groups: Any = module
        if getattr(module, "num_key_value_groups", groups) != groups:
            with_groups = _WithGroups(module, groups)
        if not reads_positions:  # masks say all there is to say
            kwargs.pop("position_ids", None)
        options = {name: _of_whole(name, each, axis, all_heads, tokens) for name, each in kwargs.items()}
        output, weights = inner(with_groups, query, key, value, mask, *args, **options)
        (output,) = exchange(axis, _TOKENS, _HEADS, output)
        return output, weights

    computed.zlaunch_wraps = inner  # type: ignore[attr-defined]  # marks what is wrapped already
    return computed


def _is_divided(module: nn.Module) -> bool:
    """Tell whether a module is called with parts of sequences. Raises ParameterError if nobody knows."""
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
        return value if value.shape[dim] == 1 else own_heads(axis, value, dim)
    if name == "position_ids" and value.dim() == 2:
        return axis.gather(value)
    raise ParameterError(f"sequence parallelism: attention does not support {name} {list(value.shape)}")
