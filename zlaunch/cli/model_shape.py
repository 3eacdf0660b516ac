"""Guess the shape of a transformer from its number of parameters, and say which shapes make GPUs faster."""

from __future__ import annotations

VOCAB = 32_000
"""Vocabulary of a model of which only the number of parameters is given."""
_LEAST_LAYER = 12 * 16**2
_TILE = 64
"""Tensor cores work on tiles: a matrix whose sides are multiples of this wastes none."""


def usual_shape(numel: float) -> tuple[int, int] | None:
    """Return the width and depth of a transformer with that many parameters; it is 128 times as wide as deep.

    None where a model is too small for any layer.
    """
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))
    while layers > 1 and 12 * (128 * layers) ** 2 * layers + VOCAB * 128 * layers > numel:
        layers -= 1
    if 12 * (128 * layers) ** 2 * layers <= numel:
        return 128 * layers, layers
    return (16, 1) if numel >= _LEAST_LAYER else None


def shape_advice(hidden: int | None, vocab: int | None) -> list[str]:
    """Return a line for each side of the model's matrices that is not a multiple of 64."""
    lines = []
    if vocab is not None and vocab % _TILE:
        lines.append(
            f"vocabulary {vocab:,} is not a multiple of {_TILE}: pad it to {_padded(vocab):,} for faster "
            "matrix products"
        )
    if hidden is not None and hidden % _TILE:
        lines.append(
            f"hidden size {hidden:,} is not a multiple of {_TILE}: {_padded(hidden):,} makes faster matrix "
            "products"
        )
    return lines


def _padded(size: int) -> int:
    return -(-size // _TILE) * _TILE
