"""Packs samples of different lengths into rows, and batches them by tokens instead of by samples.

Note [Packed rows]
    A row holds several samples, one behind the other. Each has position ids from 0 on, and a block-diagonal
    mask keeps attention inside of each sample. The mask is 0 or -inf and is added to the scores. A boolean
    one would be wrong for Hugging Face's "eager" attention, which adds it as 0 and 1. It should have the
    dtype of the scores: torch 2.13 computes wrong values on a CPU from fp64 scores and an fp32 mask.

    Without a mask, Hugging Face's models find the samples by their position ids, if they use no cache.

    The label of a sample's first token is ignored, because the last token of the sample before it would
    predict it. What fills up a row is a sample whose labels are all ignored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

IGNORED = -100


class PackingCollator:
    """Makes a micro-batch of packed rows from samples, as the ``collate_fn`` of a loader."""

    def __init__(
        self,
        max_tokens: int,
        *,
        pad_token_id: int = 0,
        mask_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        """Set the length of all rows.

        Args:
            max_tokens: Tokens in a row.
            pad_token_id: Token that fills up rows. No other token attends to it.
            mask_dtype: Dtype of ``attention_mask``, which has ``max_tokens`` squared elements a row: that in
                which attention computes. The mask replaces the model's own: models with sliding windows
                (Mistral, Gemma 2) need None, as flash attention does. None for no mask: the model has to read
                the samples from the position ids. Hugging Face's models do so with flash attention, and with
                other implementations only with ``model.config.use_cache = False`` (transformers 5.23 was
                tested).

        Raises ValueError for less than one token, TypeError for a dtype that masks cannot be added in.
        """
        if mask_dtype is not None:
            is_dtype = isinstance(mask_dtype, torch.dtype)
            if not is_dtype or not mask_dtype.is_floating_point:
                raise TypeError(f"mask_dtype is {mask_dtype}, expected a floating-point torch.dtype or None")
        if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, Integral)):
            raise TypeError(
                f"pad_token_id is {pad_token_id!r}, expected a token id: any, if the tokenizer has none"
            )
        self.max_tokens = _checked_tokens(max_tokens)
        self.pad_token_id = pad_token_id
        self.mask_dtype = mask_dtype

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return the rows of samples, which are token ids, or dicts with ``input_ids`` and maybe ``labels``
        and ``attention_mask``, which leaves out padding of the tokenizer.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``, int64 of (rows, ``max_tokens``); ``num_tokens``,
            the number of predicted tokens, 0-dim int64, for ``engine.backward(loss, num_tokens=...)``; with
            ``mask_dtype``, ``attention_mask`` of (rows, 1, ``max_tokens``, ``max_tokens``): 0 where a token
            attends to another, else -inf.

        Raises ValueError for a sample that is longer than a row, or has other numbers of labels and tokens.
        """
        pairs = [self._tokens_and_labels(sample) for sample in samples]
        rows = pack([len(tokens) for tokens, _ in pairs], self.max_tokens)
        input_ids = torch.full((len(rows), self.max_tokens), self.pad_token_id)
        labels = torch.full_like(input_ids, IGNORED)
        positions = torch.zeros_like(input_ids)
        sample_of = torch.zeros_like(input_ids)
        for row, members in enumerate(rows):
            begin = 0
            for number, member in enumerate(members):
                tokens, own_labels = pairs[member]
                place = slice(begin, begin + len(tokens))
                input_ids[row, place] = tokens
                labels[row, place] = own_labels
                labels[row, begin] = IGNORED
                positions[row, place] = torch.arange(len(tokens))
                sample_of[row, place] = number
                begin += len(tokens)
            # The positions of what fills up stay 0: models may have fewer positions than a row has tokens.
            sample_of[row, begin:] = len(members)
        found = {"input_ids": input_ids, "labels": labels, "position_ids": positions}
        found["num_tokens"] = (labels[:, 1:] != IGNORED).sum()
        if self.mask_dtype is not None:
            attends = (sample_of.unsqueeze(2) == sample_of.unsqueeze(1)).tril().unsqueeze(1)
            found["attention_mask"] = torch.zeros(attends.shape, dtype=self.mask_dtype).masked_fill_(
                ~attends, -torch.inf
            )
        return found

    def _tokens_and_labels(self, sample: Any) -> tuple[Tensor, Tensor]:
        if isinstance(sample, Mapping):
            if "input_ids" not in sample:
                raise ValueError(f"a sample has no input_ids, but {', '.join(map(repr, sample))}")
            tokens = _as_ids("input_ids", sample["input_ids"])
            labels = tokens if sample.get("labels") is None else _as_ids("labels", sample["labels"])
            if len(tokens) != len(labels):
                raise ValueError(f"a sample has {len(tokens)} tokens and {len(labels)} labels")
            if sample.get("attention_mask") is not None:
                is_real = _as_ids("attention_mask", sample["attention_mask"]).bool()
                if len(is_real) != len(tokens):
                    raise ValueError(
                        f"a sample has {len(tokens)} tokens, but {len(is_real)} in attention_mask"
                    )
                tokens = tokens[is_real]  # a tokenizer may have padded the sample
                labels = labels[is_real]
        else:
            tokens = _as_ids("a sample", sample)
            labels = tokens
        if not len(tokens):
            raise ValueError("a sample has no tokens: leave it out of the data set")
        return tokens, labels


def _as_ids(name: str, values: Any) -> Tensor:
    """Return a list, an array or a tensor of whole numbers as (n,) int64. Raises ValueError for others."""
    if isinstance(values, tuple):
        raise ValueError(f"{name} is a tuple: expected token ids, or a dict with input_ids")
    found = torch.as_tensor(values)
    if found.shape == (0,):
        return found.long()
    if found.dim() != 1 or found.is_floating_point() or found.is_complex():
        raise ValueError(
            f"{name}: expected a list of whole numbers, got {found.dtype} of shape {list(found.shape)}"
        )
    return found.long()


class TokenBatchSampler(Sampler[list[int]]):
    """Yields batches of as many samples as ``max_tokens`` hold, as the ``batch_sampler`` of a DataLoader.

    The samples of a batch stay together in all epochs; the order of the batches is new in each epoch, whose
    number the loader of an engine sets. In a loader of torch's own, call :meth:`set_epoch`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        packed: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """Form the batches.

        Args:
            lengths: Tokens of each sample.
            max_tokens: Tokens of a batch.
            packed: Whether the batch becomes one packed row, which holds the sum of its samples
                (:class:`PackingCollator`). False for samples that are padded to the longest of their batch,
                which then has samples of similar lengths.
            shuffle: Whether batches come in a new order in each epoch.
            seed: Decides the orders.

        Raises ValueError for a sample with more tokens than a batch, or without any, and for other lengths.
        """
        if isinstance(seed, bool) or not isinstance(seed, (int, Integral)):
            raise TypeError(f"seed is {seed!r}, expected a whole number")
        self._batches: list[list[int]]
        self._shuffle = shuffle
        self._seed: int = int(seed)
        self._epoch = 0
        known = _as_ids("lengths", lengths).tolist()
        limit = _checked_tokens(max_tokens)
        if packed:
            self._batches = pack(known, limit)
        else:
            self._batches = _of_similar_length(known, limit, self._generator(0) if shuffle else None)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; the loader of an engine does so itself."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self._batches)
        order = torch.arange(count)
        if self._shuffle:
            order = torch.randperm(count, generator=self._generator(self._epoch))
        return (list(self._batches[place]) for place in order)

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + epoch)


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return which samples share a row, by index, in rows of ``max_tokens``.

    Best fit decreasing: from the longest sample on, each goes where the least room is left over, which takes
    at most 11/9 of the fewest rows possible, and one more (Johnson 1973). Raises ValueError for a sample that
    is longer than a row, or empty.
    """
    rows: list[list[int]] = []
    rows_with: dict[int, list[int]] = {}  # by the room that is left in them
    rooms: list[int] = []  # the keys, sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        _check_length(index, length, max_tokens)
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row = len(rows)
            rows.append([])
            room = max_tokens
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room], rooms[at]
        rows[row].append(index)
        left = room - length
        if left:
            if left not in rows_with:
                rows_with[left] = []
                insort(rooms, left)
            rows_with[left].append(row)
    return rows


def _of_similar_length(
    lengths: Sequence[int], max_tokens: int, generator: torch.Generator | None
) -> list[list[int]]:
    """Return batches in which the number of samples times the longest of them is at most ``max_tokens``.

    Samples are sorted by length. A generator shuffles samples of equal length.
    """
    order = range(len(lengths)) if generator is None else torch.randperm(len(lengths), generator=generator)
    batches: list[list[int]] = []
    for index in sorted(map(int, order), key=lengths.__getitem__):
        length = lengths[index]
        _check_length(index, length, max_tokens)
        # sorted: the newest sample of a batch is its longest
        if batches and (len(batches[-1]) + 1) * length <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _checked_tokens(max_tokens: int) -> int:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, Integral)) or max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens!r}, expected a whole number of at least 1")
    return int(max_tokens)


def _check_length(index: int, length: int, max_tokens: int) -> None:
    if length > max_tokens:
        raise ValueError(
            f"sample {index} has {length} tokens, but a row has {max_tokens} (max_tokens): truncate it"
        )
    if length < 1:
        raise ValueError(f"sample {index} has {length} tokens, expected at least 1: leave it out")
