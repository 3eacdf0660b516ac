"""Watches a model whose script divides sequences by ``zlaunch.sequence``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import ParameterError
from ..log import warn
from .axis import SequenceAxis

_MIX_TOKENS = ("scaled_dot_product_attention", "conv1d", "lstm", "gru", "rnn_tanh", "rnn_relu", "cumsum")


class _MixedTokens(TorchFunctionMode):
    """Notes the operations of a pass that mix tokens, other than those of ``zlaunch.sequence``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _MIX_TOKENS and not sys._getframe(1).f_globals.get("__name__", "").startswith("zlaunch."):
            self.names[name] = None
        return func(*args, **(kwargs or {}))


class ScriptForward:
    """Replaces a model's forward: it has to call ``zlaunch.sequence.attention``, or the ranks that share
    sequences would compute the same, or something wrong, without a word.
    """

    def __init__(self, module: nn.Module, axis: SequenceAxis) -> None:
        self.module, self.axis = module, axis
        self._has_looked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward. Raises ParameterError if it computes no attention on whole sequences
        while it trains.
        """
        before = self.axis.attentions
        looks = self.axis.is_open and self.module.training and not self._has_looked
        mixed = _MixedTokens()
        with mixed if looks and not torch.compiler.is_compiling() else nullcontext():
            output = type(self.module).forward(self.module, *args, **kwargs)
        self._has_looked = self._has_looked or looks
        if mixed.names and self.axis.comm.rank == 0:
            warn(
                f"sequence parallelism: the model calls {', '.join(mixed.names)}, which sees only this "
                "rank's shard of each sequence. Use zlaunch.sequence.attention, which attends to whole "
                "sequences"
            )
        if self.axis.is_open and self.module.training and self.axis.attentions == before:
            raise ParameterError(
                f"parallel.sequence is {self.axis.size}, but {type(self.module).__name__} has not called "
                "zlaunch.sequence.attention: split the sequences with zlaunch.sequence.split and call it "
                "instead of scaled_dot_product_attention, or set the size to 1"
            )
        return output
