"""Notes that a script gives each rank its part of sequences, instead of whole ones."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

NOTE = "zlaunch_gets_parts"
"""Names the attribute of a model that gets parts; its value tells whether evaluations get whole sequences."""


def causal_model(model: nn.Module) -> Any:
    """Return the Hugging Face model that a model is or contains; None without one."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None
    return next((each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)), None)


def note_parts(model: nn.Module, whole_evaluations: bool) -> None:
    """Note on the Hugging Face model in a model that it gets parts of sequences with their position_ids."""
    owner = causal_model(model)
    if owner is not None:
        setattr(owner, NOTE, whole_evaluations)
