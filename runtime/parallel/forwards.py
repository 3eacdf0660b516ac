"""Defines what modules compute on their shards of the parameters, in place of their own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ParameterError
from ..zero import placeholder
from .collectives import copy_to, gather_from, reduce_from, scatter_to
from .columns import ColumnInput, compute, sums_early
from .expert import by_position
from .tensor_axis import LAYER, TensorAxis
from .token_shards import Region
from .vocabulary_loss import VocabularyLoss


class SharedForward:
    """Replaces a module's forward; a copy of the model computes with the copied module."""

    def __init__(self, module: nn.Module, axis: TensorAxis) -> None:
        self.module = module
        self.axis = axis
        self.name = ""
        """The module's name in the model, for what is said about it."""
        self.region: Region | None = None
        """The region that the module is in; None where tokens are never divided."""

    def open_shard_rng(self) -> None:
        """Seed the random numbers for this rank, while the model trains."""
        if self.axis.shard_rng is not None and self.module.training:
            self.axis.shard_rng.open()

    def close_shard_rng(self) -> None:
        """Restore the random numbers that all ranks have."""
        if self.axis.shard_rng is not None:
            self.axis.shard_rng.close()

    def has_all_tokens(self) -> bool:
        """Tell whether the module is in a region that has gathered the ranks' tokens in this pass."""
        return self.region is not None and self.region.has_all_tokens()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)


class ColumnForward(SharedForward):
    """Computes a shard of a linear layer's outputs."""

    gathers = False
    is_followed = True
    """Say whether the shards are gathered, and whether operations on a shard are followed."""

    def __init__(self, module: nn.Module, axis: TensorAxis) -> None:
        super().__init__(module, axis)
        self.is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        self.layers: list[nn.Linear] = []
        """Lists the layers whose weights may get their gradients beside the sum of the input's."""

    def __call__(self, input: Tensor) -> Tensor:
        output = self._compute(input)
        if self.gathers:
            return gather_from(output, self.axis, LAYER)
        self.open_shard_rng()
        if self.axis.watched is not None and self.is_followed:
            self.axis.watched.shards.note(output, self.name)
        return output

    def _compute(self, input: Tensor) -> Tensor:
        has_all = self.has_all_tokens()
        if not has_all:  # with them, the region has made the copy
            input = copy_to(input, self.axis, LAYER, self._copy if sums_early(input) else None)
        if not self.is_plain or not sums_early(input) or not self.module.weight.requires_grad:
            output: Tensor = self.original(input)
            return output
        assert isinstance(self.module, nn.Linear)
        shared = self.region.column_input if has_all and self.region is not None else self.axis.column_input
        if shared is not None and not shared.is_value(input):
            shared = None
        return compute(self.module, input, self.module.bias, shared)

    def _copy(self, value: Tensor) -> Tensor:
        self.axis.column_input = ColumnInput(self.axis, LAYER, self.layers)
        return self.axis.column_input.copy(value)


class PackedColumnForward(ColumnForward):
    """Computes a shard of each half of a linear layer's outputs."""

    is_followed = False


class GatheredColumnForward(ColumnForward):
    """Computes a shard of a linear layer's outputs, and gathers them."""

    gathers = True


class LossHeadForward(ColumnForward):
    """Computes a shard of the logits in training, for a loss that takes it, and all logits in evaluation."""

    def __init__(self, module: nn.Module, axis: TensorAxis, loss: VocabularyLoss) -> None:
        super().__init__(module, axis)
        self.loss = loss

    def __call__(self, input: Tensor) -> Tensor:
        output = self._compute(input)
        if not self.module.training:
            return gather_from(output, self.axis, LAYER)
        if placeholder.in_backward():  # recomputed, after the loss
            return output
        if not self.loss.is_open:
            raise ParameterError(
                f"tensor_parallel.vocab_parallel_loss: {self.name} is called by itself in training, where "
                "each rank has the logits of other words: call the whole model with labels, or remove the key"
            )
        self.loss.is_due = True
        return output


class RowForward(SharedForward):
    """Computes a linear layer from a shard of its inputs, and sums the results."""

    splits = False

    def __call__(self, input: Tensor) -> Tensor:
        self.close_shard_rng()
        shard = scatter_to(input, self.axis, LAYER) if self.splits else input
        assert isinstance(self.module, nn.Linear)
        needed = self.module.in_features // self.axis.size
        if shard.shape[-1] != needed:
            raise ParameterError(
                f"tensor parallelism: {self.name} gets {input.shape[-1]} inputs on each rank and uses "
                f"{shard.shape[-1]}, but its shard has {needed}: use rowwise after a colwise layer, "
                "rowwise_split_input for whole inputs"
            )
        product = self._product(self.module, shard)
        bias = self.module.bias
        if self.region is not None and self.region.has_all_tokens():
            return self.region.sum_to_shard(product, bias)
        output = reduce_from(product, self.axis, LAYER, owned=True)
        return output if bias is None else output + bias

    def _product(self, module: nn.Linear, shard: Tensor) -> Tensor:
        if not module.weight.requires_grad or not sums_early(shard):
            return functional.linear(shard, module.weight)
        shared = self.axis.column_input if self.region is None else self.region.column_input
        return compute(module, shard, None, shared)


class SplitRowForward(RowForward):
    """Computes a linear layer from this rank's shard of replicated inputs, and sums the results."""

    splits = True


class LatentForward(SharedForward):
    """Computes a replicated linear layer, whose last ``shared`` outputs all heads use, on each rank its own:
    the key with positions of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1.3).
    """

    def __init__(self, module: nn.Module, axis: TensorAxis, shared: int) -> None:
        super().__init__(module, axis)
        self.shared = shared

    def __call__(self, input: Tensor) -> Tensor:
        output: Tensor = self.original(input)
        latent, key = torch.split(output, [output.shape[-1] - self.shared, self.shared], -1)
        found = torch.cat([latent, copy_to(key, self.axis, LAYER)], -1)
        if self.axis.watched is not None:
            self.axis.watched.replicated.note_mixed(found)
        return found


class VocabularyForward(SharedForward):
    """Looks up the rows that this rank has of an embedding, and sums the results: other rows give zeros."""

    def __init__(self, module: nn.Module, axis: TensorAxis, first: int, rows: int) -> None:
        super().__init__(module, axis)
        self.first = first
        self.rows = rows

    def __call__(self, input: Tensor) -> Tensor:
        local = input - self.first
        # a number of no row is nowhere else: looking it up raises here what it raises in a full embedding
        total = self.rows * self.axis.size
        elsewhere = (local < 0) & (input >= 0) | (local >= self.rows) & (input < total)
        output: Tensor = self.original(local.masked_fill(elsewhere, 0))
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_from(output, self.axis, LAYER, owned=True)


class WidthForward(SharedForward):
    """Looks up this rank's columns of an embedding, and gathers the shards."""

    def __call__(self, input: Tensor) -> Tensor:
        return gather_from(self.original(input), self.axis, LAYER)


class SummedForward(SharedForward):
    """Sums the outputs of a module whose inside is sharded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        self.close_shard_rng()
        return reduce_from(output, self.axis, LAYER)


class ExpertsForward(SharedForward):
    """Computes a shard of every expert, and sums the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (hidden, *routing), kwargs = by_position(self.module, args, kwargs)
        if len(routing) >= 2:
            index, weights, *rest = routing
            routing = [index, copy_to(weights, self.axis, LAYER), *rest]
        hidden = copy_to(hidden, self.axis, LAYER)
        self.open_shard_rng()
        output = self.original(hidden, *routing, **kwargs)
        self.close_shard_rng()
        return reduce_from(output, self.axis, LAYER)


Forward = Callable[[nn.Module, TensorAxis], SharedForward]
LINEAR: dict[str, Forward] = {
    "colwise": ColumnForward,
    "colwise_gather_output": GatheredColumnForward,
    "packed_colwise": PackedColumnForward,
    "rowwise": RowForward,
    "rowwise_split_input": SplitRowForward,
}
"""Names what linear layers compute by style."""
