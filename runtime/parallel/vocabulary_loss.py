"""Computes a causal language model's loss where each rank has the logits of other words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..activation.tiles import IGNORED, LogitShards, chunked_cross_entropy, pick, whole_cross_entropy
from .collectives import reduce_from
from .tensor_axis import LAYER, TensorAxis


class VocabularyLoss(LogitShards):
    """Computes the loss of transformers' causal language models from this rank's shard of the logits, (...,
    vocabulary / ranks).

    The formula is -log softmax at the label, with sums over the shards: Megatron-LM, arXiv 1909.08053, 3.
    """

    def __init__(self, axis: TensorAxis, words: int, *, chunked: bool) -> None:
        """``words`` is the size of the vocabulary. With ``chunked``, large losses are computed in chunks."""
        self.axis = axis
        self.is_open = False
        """Tells whether the model's forward pass is running."""
        self.is_due = False
        """Tells whether the head has computed this rank's shard of the logits, and nobody its loss."""
        self._words = words
        self._chunked = chunked

    def __deepcopy__(self, memo: Any) -> VocabularyLoss:
        return VocabularyLoss(self.axis, self._words, chunked=self._chunked)

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
        """Return the mean (or the sum divided by ``num_items_in_batch``) over the labels that count. Raises
        ValueError for another number of labels than of rows of logits.
        """
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        rows = logits.reshape(-1, logits.shape[-1])
        self.is_due = False
        shards = None if logits.shape[-1] == self._words else self  # in evaluation, each rank has all
        if not self._chunked:
            total = whole_cross_entropy(rows, targets, ignore_index, shards)
        else:
            total = chunked_cross_entropy(rows, targets, ignore_index, shards)
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        mean: Tensor = total / num_items_in_batch
        return mean

    def begin(self, module: nn.Module, args: Any) -> None:
        """Begin a forward pass of the model. A hook."""
        self.is_open = True
        self.is_due = False

    def end(self) -> bool:
        """End a forward pass; tell whether its loss is still due."""
        is_due = self.is_due
        self.is_open = False
        self.is_due = False
        return is_due

    def find(self, targets: Tensor, counts: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """Return the targets as numbers of this rank's words, and which of them are words of this rank."""
        local = targets - self.axis.rank * words
        # a label of no word is nowhere else: its lookup raises, as a loss of full logits does
        elsewhere = (local < 0) & (targets >= 0) | (local >= words) & (targets < words * self.axis.size)
        is_here = counts & ~elsewhere
        return torch.where(is_here, local, 0), is_here

    def join(self, norms: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of sums of exponentials, and the logits at the targets, of all words."""
        shift = self.axis.max(norms.clone(), LAYER)
        sums = self.axis.sum(torch.stack([(norms - shift).exp(), chosen]), LAYER)
        return sums[0].log() + shift, sums[1]

    def whole_loss(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """Return the summed loss, by operations that can be differentiated again."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counts = targets != ignored
        places, is_here = self.find(targets, counts, logits.shape[-1])
        shift = self.axis.max(wide.detach().amax(-1), LAYER)
        sums = (wide - shift.unsqueeze(-1)).exp().sum(-1)
        total = reduce_from(sums, self.axis, LAYER, owned=True)
        picked = pick(wide, places, targets)
        chosen = reduce_from(picked.masked_fill(~is_here, 0), self.axis, LAYER, owned=True)
        return (total.log() + shift - chosen).masked_fill(~counts, 0).sum()
