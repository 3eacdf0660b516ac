"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: attention and loaders of divided sequences, tiles."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from zlaunch.compat.deepspeed import sequence_groups
from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.runtime.activation.tiles import recomputed
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.parallel.sequence import note_shards

_IGNORED = -100


class UlyssesSPAttentionHF:
    """Says that a Hugging Face model's sequences are divided; ``initialize`` sees to its attention."""

    whole_evaluations: bool | None = None
    """Tells whether evaluations are of whole sequences, as the last registration has said."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotInZlaunch("UlyssesSPAttentionHF(...) is not supported: call its register_with_transformers")

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """Note that ``initialize`` divides the attention of a model over so many consecutive ranks; return
        what it takes as ``mpu``, None for one rank.

        ``model_name_or_path`` is the model, or the name of one that is loaded later. The sequences'
        length may change in any case, and so may the batch; an attention of None is the model's. Collective.
        Raises ValueError for another attention than the model's.
        """
        if sequence_parallel_size == 1:
            return None
        config: Any = getattr(model_name_or_path, "config", None)
        own = getattr(config, "_attn_implementation", None)
        if core_attn_implementation is not None and own not in (None, core_attn_implementation):
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}, but the model was loaded with "
                f"attn_implementation={own!r}: make them equal"
            )
        if core_attn_implementation == "eager":
            raise ValueError("core_attn_implementation='eager' is not supported: take \"sdpa\"")
        sequence_groups.initialize_sequence_parallel(sequence_parallel_size)
        cls.whole_evaluations = disable_in_eval
        if isinstance(model_name_or_path, nn.Module):
            note_shards(model_name_or_path, disable_in_eval)
        return sequence_groups


class UlyssesSPDataLoaderAdapter:
    """Gives each rank its part of the batches of all ranks that share sequences, one batch after the other.

    Batches are dicts with ``input_ids`` and ``labels``; tensors are (batch, tokens, ...). Each becomes
    ``sp_world_size`` ones: of each rank's batch a part for every rank, with ``position_ids`` (by default from
    0 on) and with ``shift_labels`` in place of ``labels``.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self.micro_batches: deque[dict[str, Any]] = deque()
        self.iter: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dl" not in self.__dict__:  # a copy is being made
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self.iter = iter(self.dl)
        self.micro_batches.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Take a batch of each rank. Collective. Raises StopIteration on all ranks when one has no more, and
        ParameterError for a batch that cannot be divided.
        """
        if self.iter is None:
            self.iter = iter(self.dl)
        batch = next(self.iter, None)
        own = None
        problem = ""
        if batch is not None:
            try:
                own = self._prepared(batch)
            except ParameterError as error:
                problem = str(error)
        facts: list[Any] = [None] * self.sp_world_size
        dist.all_gather_object(facts, (problem, own and _describe(own)), group=self.sp_group)
        for said, _ in facts:
            if said:
                raise ParameterError(said)
        if own is None or any(described is None for _, described in facts):
            self.iter = None
            raise StopIteration
        described = [each for _, each in facts]
        for name in sorted({name for each in described for name in each}):
            kinds = {each[name][0] if name in each else "none" for each in described}
            if len(kinds) > 1:
                raise ParameterError(
                    f"UlyssesSPDataLoaderAdapter: the batches of the ranks differ: {name} is "
                    f"{' and '.join(sorted(kinds))}"
                )
        batches: list[dict[str, Any]] = [{} for _ in facts]
        for name in sorted(own):
            parts = self._parts(own[name], [each[name] for each in described])
            for found, part in zip(batches, parts, strict=True):
                found[name] = part
        self.micro_batches.extend(batches)

    def _prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch with positions and shifted labels. Raises ParameterError."""
        found = dict(batch)
        tokens: Any = found.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ParameterError("UlyssesSPDataLoaderAdapter: a batch has no input_ids, (batch, tokens)")
        length = tokens.shape[1]
        if length % self.sp_world_size:
            raise ParameterError(
                f"UlyssesSPDataLoaderAdapter: {length} tokens cannot be divided by {self.sp_world_size} "
                "ranks: pad batches to a multiple of that (the collator's pad_to_multiple_of)"
            )
        for name, value in found.items():
            if isinstance(value, Tensor) and (value.dim() < 2 or value.shape[1] != length):
                raise ParameterError(
                    f"UlyssesSPDataLoaderAdapter: {name} is {list(value.shape)}, but there are {length} "
                    "tokens in the second dimension of input_ids"
                )
        if "position_ids" not in found:
            found["position_ids"] = torch.arange(length).expand(len(tokens), -1)
        if "labels" in found:
            labels = functional.pad(found.pop("labels"), (0, 1), value=_IGNORED)
            found["shift_labels"] = labels[..., 1:]
        return found

    def _parts(self, value: Any, described: list[Any]) -> list[Any]:
        """Return this rank's part of a value of each rank's batch; what is no tensor, as it is."""
        if not isinstance(value, Tensor):
            return [each[1] for each in described]
        size = self.sp_world_size
        pieces = torch.cat([piece.reshape(-1) for piece in value.to(self.device).chunk(size, 1)])
        shapes = [(shape[0], shape[1] // size, *shape[2:]) for _, shape in described]
        counts = [math.prod(shape) for shape in shapes]
        received = pieces.new_empty(sum(counts))
        dist.all_to_all_single(received, pieces, counts, [pieces.numel() // size] * size, group=self.sp_group)
        parts = torch.split(received.cpu(), counts)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _describe(batch: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the dtype and shape of each tensor of a batch, and all else as it is."""
    return {
        name: (str(value.dtype), tuple(value.shape)) if isinstance(value, Tensor) else ("no tensor", value)
        for name, value in batch.items()
    }


class TiledMLP:
    """Computes a layer in tiles of tokens, of which the backward pass recomputes one after the other."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return ``fn(self, x)``.

        Args:
            fn: Computes each token by itself.
            self: The layer.
            x: (batch, tokens, width) or (tokens, width).
            shards: The number of tiles; there are fewer where tokens are.
            compute_params: The layer's weights; not needed here.
        """
        return torch.cat([recomputed(partial(fn, self), tile) for tile in x.chunk(shards, -2)], -2)


class TiledFusedLogitsLoss:
    """Computes a loss in tiles of tokens, so that only one tile of logits exists at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None,
        output_reduction: str,
    ) -> Tensor:
        """Return the mean or the sum of the tiles' losses.

        Args:
            fn: Returns the loss of ``(self, x, y)`` of a tile, or of ``(self, x, y, mask)``, whose first
                dimension is tokens.
            self: The layer.
            x: (batch, tokens, ...).
            y: Labels, (batch, tokens, ...).
            mask: (batch, tokens), or None.
            shards: The number of tiles; there are fewer where tokens are.
            compute_params: The layer's weights; not needed here.
            output_reduction: ``"mean"`` or ``"sum"``.

        Raises:
            ValueError: another reduction, shapes that do not match, or a loss of several elements.
        """
        if output_reduction not in ("mean", "sum"):
            raise ValueError(f'output_reduction: expected "mean" or "sum", got {output_reduction!r}')
        given = [x, y] if mask is None else [x, y, mask]
        if any(each.dim() < 2 or each.shape[:2] != x.shape[:2] for each in given):
            raise ValueError(
                "expected (batch, tokens, ...) of one size, got "
                + ", ".join(str(list(each.shape)) for each in given)
            )
        tiles = zip(*(each.flatten(0, 1).chunk(shards) for each in given), strict=True)
        losses = [recomputed(partial(fn, self), *tile) for tile in tiles]
        if not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses):
            raise ValueError("fn must return the loss of a tile: a tensor of one element")
        total = torch.stack([loss.reshape(()) for loss in losses]).sum()
        return total / len(losses) if output_reduction == "mean" else total
