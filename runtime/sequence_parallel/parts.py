"""Notes that a script gives each rank its part of sequences, instead of whole ones."""

from __future__ import annotations

from torch import nn

from ..model_plans import causal_model

NOTE = "zlaunch_gets_parts"
"""Names the attribute of a model that gets parts; its value tells whether evaluations get whole sequences."""


def note_parts(model: nn.Module, whole_evaluations: bool) -> None:
    """Note on the Hugging Face model in a model that it gets parts of sequences with their position_ids."""
    owner = causal_model(model)
    if owner is not None:
        setattr(owner, NOTE, whole_evaluations)
