"""Estimates the memory of a transformer's activations by a formula. `fake_step.py` measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..activation.tiles import TILE_NUMEL, has_causal_loss
from .model import ModelSizes

AUTOCAST = {"bf16_autocast": "bfloat16", "fp16_autocast": "float16"}
"""Maps names of ``zlaunch estimate --dtype`` to what torch.autocast computes in."""
_WHOLE_BYTES = 10
_SHARED_BYTES = 24
"""Count the bytes that a transformer layer keeps for each element of its input in 16 bits, with an attention
that keeps no matrix of scores, on each rank and on the ranks that share the layer together (Korthikanti et
al., 2022, equation 2 without its last term).
"""
_NAMES: tuple[Sequence[str], ...] = (
    ("hidden_size", "d_model", "n_embd"),
    ("num_hidden_layers", "num_layers", "n_layer"),
    ("vocab_size",),
)


@dataclass(frozen=True, slots=True)
class Activations:
    """Holds the bytes that a rank's activations take at most, in a step with one micro-batch."""

    plain: int
    checkpointed: int | None
    """With every block checkpointed; None where there are no blocks."""
    source: str


def transformer_activations(
    hidden: int,
    layers: int,
    vocab: int,
    tokens: int,
    dtype_bytes: int,
    tensor: int = 1,
    *,
    chunked_loss: bool = False,
    tiled_loss: bool = False,
) -> Activations:
    """Estimate a transformer's activations from its width, depth, vocabulary and the tokens of a micro-batch,
    on each of ``tensor`` ranks that share its layers.

    Source: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models". The
    output layer has logits in the compute dtype and in fp32, and a gradient of each; with ``chunked_loss``
    in the compute dtype alone, with ``tiled_loss`` no more than a tile of them.
    """
    layer = (_WHOLE_BYTES + _SHARED_BYTES // tensor) * tokens * hidden * dtype_bytes // 2
    head_tokens = min(tokens, max(1, TILE_NUMEL // vocab)) if tiled_loss else tokens
    head = logits_bytes(head_tokens, vocab, dtype_bytes, chunked=chunked_loss)
    inputs = tokens * hidden * dtype_bytes * layers
    source = "the formula of Korthikanti et al., 2022"
    return Activations(layer * layers + head, inputs + max(layer, head), source)


def logits_bytes(tokens: int, vocab: int, dtype_bytes: int, *, chunked: bool = False) -> int:
    """Return the bytes of logits and of their gradient: in the compute dtype and, unless the loss is computed
    in chunks, in fp32.
    """
    return tokens * vocab * 2 * (dtype_bytes + (0 if chunked else 4))


def activations_per_token(
    model: Any, dtype_bytes: int, sequence: int = 1, tensor: int = 1
) -> Activations | None:
    """Estimate a rank's activations of one token, of ``sequence`` ranks that share its sequence and
    ``tensor`` ones that share each layer, from a Hugging Face model's config; None where it does not say its
    width, depth and vocabulary, and where the model has no output for each word of it.
    """
    described = getattr(model, "config", None)
    try:
        has_head = model.get_output_embeddings() is not None
    except Exception:  # another library's method, or none: this is for a line of text
        has_head = False
    if described is None or not has_head:
        return None
    found: list[int] = []
    for names in _NAMES:
        values = [getattr(described, name, None) for name in names]
        known = [value for value in values if isinstance(value, int) and value > 0]
        if not known:
            return None
        found.append(known[0])
    hidden, layers, vocab = found
    chunked = has_causal_loss(model)
    of_all = transformer_activations(hidden, layers, vocab, 1, dtype_bytes, tensor, chunked_loss=chunked)
    assert of_all.checkpointed is not None
    plain, checkpointed = (max(1, each // sequence) for each in (of_all.plain, of_all.checkpointed))
    return Activations(plain, checkpointed, of_all.source)


def of_numbers(
    model: ModelSizes,
    sequence: int,
    micro_batch: int,
    dtype_bytes: int,
    tensor: int = 1,
    *,
    tiled_loss: bool = False,
) -> Activations | None:
    """Estimate the activations of a transformer whose layers ``tensor`` ranks share, by the formula; None
    where a size is missing.
    """
    if model.hidden is None or model.layers is None or model.vocab is None:
        return None
    tokens = sequence * micro_batch
    sizes = model.hidden, model.layers, model.vocab
    return transformer_activations(*sizes, tokens, dtype_bytes, tensor, tiled_loss=tiled_loss)
