"""Watches a model whose script divides sequences by ``zlaunch.sequence``."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ParameterError
from .axis import SequenceAxis


class ScriptForward:
    """Replaces a model's forward: it has to call ``zlaunch.sequence.attention``, or the ranks that share
    sequences would compute the same, or something wrong, without a word.
    """

    def __init__(self, module: nn.Module, axis: SequenceAxis) -> None:
        self.module, self.axis = module, axis

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward. Raises ParameterError if it computes no attention on whole sequences
        while it trains.
        """
        before = self.axis.attentions
        output = type(self.module).forward(self.module, *args, **kwargs)
        if self.axis.is_open and self.module.training and self.axis.attentions == before:
            raise ParameterError(
                f"parallel.sequence is {self.axis.size}, but {type(self.module).__name__} has not called "
                "zlaunch.sequence.attention: divide the sequences by zlaunch.sequence.split and call it in "
                "place of scaled_dot_product_attention, or set the size to 1"
            )
        return output
