"""Gives rotary embeddings whose frequencies depend on the length of a sequence the whole sequences' one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .axis import SequenceAxis

_BY_LENGTH = ("dynamic", "longrope")


class RotaryForward:
    """Replaces a rotary embedding's forward: computes with whole sequences, and returns this rank's part."""

    def __init__(self, module: Any, axis: SequenceAxis) -> None:
        self.module, self.axis = module, axis

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cosines and sines, (batch or 1, tokens, width), of this rank's tokens."""
        whole, forward = self.axis.positions, type(self.module).forward
        is_part = whole is not None and whole.shape[-1] == position_ids.shape[-1] * self.axis.size
        if whole is None or not is_part:
            return forward(self.module, x, position_ids, *args, **kwargs)
        found = forward(self.module, x, whole, *args, **kwargs)
        return tuple(self.axis.part(each, dim=each.dim() - 2) for each in found)


def give_whole_lengths(model: nn.Module, axis: SequenceAxis) -> None:
    """Let the rotary embeddings of a Hugging Face model see the length of whole sequences, if they use it."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(name, str) and any(each in name for each in _BY_LENGTH) for name in names):
            module.forward = RotaryForward(module, axis)
