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
        summed, count = SequenceTotals(self.axis)(own, (wanted != ignore_index).sum())
        if num_items_in_batch is None:
            return summed / count
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(summed.device)
        mean: Tensor = summed / num_items_in_batch
        return mean


class PartOfLabels:
    """Returns this rank's part of labels, in a pass with parts of sequences; else all."""

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis = axis

    def __call__(self, labels: Tensor) -> Tensor:
        return self.axis.part(labels) if self.axis.is_open else labels


class SequenceTotals:
    """Adds up the sum of losses, and their number, over the ranks that share sequences."""

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis = axis

    def __call__(self, summed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if not passes:
            return summed, count
        return total(summed, self.axis), self.axis.sum(count)
