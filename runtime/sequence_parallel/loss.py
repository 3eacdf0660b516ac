"""Computes a causal language model's loss where each rank has a part of the logits' tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .axis import SequenceAxis, total
from .masks import passes

IGNORED = -100


class SequenceLoss:
    """Computes the mean cross-entropy of all tokens from this rank's logits, (..., tokens / ranks,
    vocabulary), in place of Hugging Face's ForCausalLMLoss: labels have been shifted already.
    """

    def __init__(self, axis: SequenceAxis, whole: Callable[..., Tensor]) -> None:
        """``whole`` computes the loss outside of a pass with parts of sequences."""
        self.axis, self.whole = axis, whole
        self.calls = 0

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean (or the sum divided by ``num_items_in_batch``) over the labels that count."""
        if not passes:
            return self.whole(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        self.calls += 1
        wanted = labels if shift_labels is None else shift_labels
        assert wanted is not None
        wanted = wanted.reshape(-1).to(logits.device)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        own = functional.cross_entropy(
            wide.reshape(-1, logits.shape[-1]), wanted, ignore_index=ignore_index, reduction="sum"
        )
        summed = total(own, self.axis)
        if num_items_in_batch is None:
            return summed / self.axis.sum((wanted != ignore_index).sum())
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(summed.device)
        mean: Tensor = summed / num_items_in_batch
        return mean
