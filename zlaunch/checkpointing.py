"""Activation checkpointing: ``zlaunch.checkpointing``.

Call :func:`configure` once, then ``checkpoint(layer, x)`` in the model's forward. Or call
:func:`checkpoint_blocks` on an unchanged model, as the config's ``activation_checkpointing.enabled`` does.
"""

from zlaunch.runtime.activation.checkpointing import (
    checkpoint,
    checkpoint_blocks,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
    set_num_layers,
    tiled,
    tiled_cross_entropy,
)

__all__ = [
    "checkpoint",
    "checkpoint_blocks",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "reset",
    "set_num_layers",
    "tiled",
    "tiled_cross_entropy",
]
