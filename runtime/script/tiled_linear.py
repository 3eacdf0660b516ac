"""Linear layers made of several smaller ones, for a layer that is too large to be gathered whole."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from ..zero.policy import Tiles
from .construct import GatheredParameters


class TiledLinear(nn.Module):
    """Computes what ``nn.Linear`` does, by ``out_splits`` times ``in_splits`` layers that stage 3 gathers one
    at a time. Their parameters are ``linears.ROW.COLUMN.weight`` and ``.bias``, as in DeepSpeed's class.

    Args:
        in_features: The size of the input's last dimension.
        out_features: The size of the output's last dimension.
        bias: Adds a bias. The layers of the last column have it.
        in_splits: Counts the tiles along the input. With several, a tile's initial values have the range of
            a layer of the tile's width, and results are sums of ``in_splits`` products.
        out_splits: Counts the tiles along the output. This is the split that needs no sums.
        input_is_already_split: Takes a sequence of ``in_splits`` tensors as input.
        combine_out_splits: Joins the outputs of rows along the last dimension. If False, returns a list.
        linear_cls: The class of the layers, called with the input's size, the output's size, ``bias`` and
            ``kwargs``.
        init_linear: A layer of the whole size, whose values are copied. Tiles have its dtype and device, and
            require gradients where it does.
        kwargs: More arguments for ``linear_cls``, such as ``device`` and ``dtype``.

    Raises:
        ParameterError: A number of splits is none, below 1 or above the number of features, ``bias`` is a
            number above 1, or ``init_linear`` is no linear layer, has another shape, or has values that tiles
            on the meta device cannot hold.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        # The third argument, as of nn.Linear: a script may mean a number of splits.
        if isinstance(bias, int) and bias not in (0, 1):
            raise ParameterError(f"TiledLinear: expected True or False as bias, got {bias}")
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)
        """Holds the first feature of each tile along the input, and ``in_features`` at the end."""
        self.out_parts = _bounds("out", out_features, out_splits)
        """Holds the same along the output."""
        if init_linear is not None:
            _check_layer(init_linear)
            kwargs = {**_kind_of(init_linear, linear_cls), **kwargs}
        self.linears = Tiles()
        for height in _sizes(self.out_parts):
            row = Tiles()
            for column, width in enumerate(_sizes(self.in_parts)):
                row.append(linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)
            for tile in self._tiles():
                tile.weight.requires_grad_(init_linear.weight.requires_grad)
                if tile.bias is not None:
                    tile.bias.requires_grad_(init_linear.bias.requires_grad)

    def _tiles(self) -> Iterator[Any]:
        for row in self.linears:
            yield from row  # type: ignore[misc]

    def extra_repr(self) -> str:
        splits = f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {splits}"

    def forward(self, input_: Any) -> Any:
        """Return ``input_ @ weight.T + bias`` (..., out_features) of an input (..., in_features).

        Raises ParameterError for another number of inputs than ``in_splits``.
        """
        inputs: Sequence[Any] = [input_]
        if self.input_is_already_split:
            # DeepSpeed takes a plain tensor for an input that is not split
            inputs = [input_] if isinstance(input_, Tensor) and self.in_splits == 1 else input_
        elif self.in_splits > 1:
            inputs = self._split_global_input(input_, _sizes(self.in_parts))
        if len(inputs) != self.in_splits:
            raise ParameterError(f"TiledLinear: expected {self.in_splits} inputs, got {len(inputs)}")
        outputs = []
        for out_id, row in enumerate(self.linears):
            output = None
            for in_id in range(self.in_splits):
                new_out = row[in_id](inputs[in_id])  # type: ignore[index]
                output = self._reduce_local_output(in_id, out_id, output, new_out)
            outputs.append(output)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    # DeepSpeed documents that classes for other inputs and outputs override the following three.

    def _split_global_input(self, input: Tensor, split_sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return the parts of an input, of the given sizes along the last dimension."""
        return torch.split(input, list(split_sizes), -1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Return the sum of a row's outputs so far; ``current_out`` is None at the first."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        """Return the outputs of all rows as one."""
        return torch.cat(list(outputs), -1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of a layer of the whole size. Collective where either is sharded; rank 0's values
        count then. Raises ParameterError for a layer of another shape, or with a bias where this has none.
        """
        _check_layer(other)
        with GatheredParameters(other):
            weight: Any = other.weight
            bias: Any = other.bias
            shape = (self.out_features, self.in_features)
            if weight.shape != shape or (bias is not None) is not self.use_bias:
                raise ParameterError(
                    f"TiledLinear: expected a layer with a weight of shape {shape} and "
                    f"{'a' if self.use_bias else 'no'} bias, got {tuple(weight.shape)} and "
                    f"{'a' if bias is not None else 'no'} bias"
                )
            for height, row in enumerate(self.linears):
                rows = slice(*self.out_parts[height : height + 2])
                for width in range(self.in_splits):
                    tile: Any = row[width]  # type: ignore[index]
                    columns = slice(*self.in_parts[width : width + 2])
                    if tile.weight.is_meta and not weight.is_meta:
                        raise ParameterError(
                            "TiledLinear: tiles on the meta device cannot hold the values of a layer on "
                            f"{weight.device}: leave device out, or give a layer on the meta device"
                        )
                    with GatheredParameters(tile, modifier_rank=0):
                        tile.weight.copy_(weight[rows, columns])
                        if tile.bias is not None:
                            tile.bias.copy_(bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """Is a :class:`TiledLinear` of layers that return a pair, of the product and the bias, which they do not
    add, as Megatron-LM's do. Returns such a pair.
    """

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        product, own_bias = new_out
        total = None
        bias = None
        if current_out is not None:
            total, bias = current_out
        total = super()._reduce_local_output(in_id, out_id, total, product)
        return total, bias if own_bias is None else own_bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        bias = super()._combine_output_splits(biases) if biases else None
        return super()._combine_output_splits([total for total, _ in outputs]), bias


def _check_layer(layer: Any) -> None:
    """Raise ParameterError for what has no weight matrix, or no bias that is a tensor or None."""
    weight = getattr(layer, "weight", None)
    bias = getattr(layer, "bias", layer)
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        raise ParameterError(
            f"TiledLinear: expected a layer with a weight and a bias, got {type(layer).__name__}"
        )


def _kind_of(layer: nn.Module, linear_cls: type[nn.Module]) -> dict[str, Any]:
    """Return the dtype and the device of a layer's weight, as far as they are arguments of a class."""
    weight: Any = layer.weight
    taken = inspect.signature(linear_cls).parameters
    return {key: getattr(weight, key) for key in ("dtype", "device") if key in taken}


def _bounds(name: str, features: int, splits: int) -> list[int]:
    """Return the first feature of each part, and the number of features; the first parts may be longer."""
    whole = isinstance(splits, (int, Integral)) and not isinstance(splits, bool)
    if not whole or not 1 <= splits <= features:
        raise ParameterError(
            f"TiledLinear: expected {name}_splits from 1 to {name}_features ({features}), got {splits!r}"
        )
    size, longer = divmod(features, splits)
    return [part * size + min(part, longer) for part in range(splits + 1)]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]
