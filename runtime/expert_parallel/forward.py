"""Defines what a module of experts computes where each rank has some of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from .axis import ExpertAxis, exchange
from .indices import bounds, check_bounds, check_kind

Inner = Callable[..., Tensor]


def by_position(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call of a module, by position where its forward has names for them. Raises
    TypeError for a call that its forward does not take.
    """
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return bound.args[1:], bound.kwargs


class DispatchForward:
    """Replaces a module's forward: sends each token once to each rank that has experts of it, and sums what
    they return. No token is dropped, whatever the routing.

    The module gets each pair of token and expert as a token with one expert.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        axis: ExpertAxis,
        experts: int,
        inner: Callable[..., Tensor] | None,
    ) -> None:
        """Compute the experts of this rank with ``inner``, by default the module's own forward."""
        self.module, self.name, self.axis, self.inner = module, name, axis, inner
        self.local = experts // axis.size

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the weighted sums of the experts' outputs, (tokens, width), of tokens (tokens, width),
        experts' numbers and weights (tokens, k), in the tokens' dtype, however the module names them. An
        index of -1 adds nothing.

        Raises ParameterError for numbers of no expert.
        """
        args, kwargs = by_position(self.module, args, kwargs)
        if len(args) < 3:
            raise ParameterError(
                f"expert parallelism: {self.name}: expected tokens, experts and weights, got {len(args)} "
                "positional arguments"
            )
        hidden, index, weights, *rest = args
        return self._send(hidden, index, weights, rest, kwargs)

    def _send(self, hidden: Tensor, index: Tensor, weights: Tensor, args: Any, kwargs: Any) -> Tensor:
        self._check(hidden, index, weights)
        axis = self.axis
        owners = index.div(self.local, rounding_mode="floor")
        goes = (owners.unsqueeze(-1) == torch.arange(axis.size, device=index.device)).any(1)
        token = goes.t().nonzero(as_tuple=True)[1]
        counts = goes.sum(0)
        came = axis.exchange(counts, [1] * axis.size, [1] * axis.size)
        *numbers, lowest, highest = torch.cat([counts, came, bounds(index)]).tolist()
        check_bounds(f"expert parallelism: {self.name}", lowest, highest, self.local * axis.size)
        sent, received = numbers[: axis.size], numbers[axis.size :]
        wanted = axis.exchange(index[token], sent, received) - axis.place * self.local
        rows, scales = exchange(axis, sent, received, hidden[token], weights[token])
        output = self._compute(rows, wanted, scales, args, kwargs)
        (found,) = exchange(axis, received, sent, output)
        whole = found.new_zeros((hidden.shape[0], *found.shape[1:]))
        return whole.index_add(0, token, found)

    def _compute(self, rows: Tensor, wanted: Tensor, scales: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Return the sums of this rank's experts for rows of tokens."""
        row, slot = ((wanted >= 0) & (wanted < self.local)).nonzero(as_tuple=True)
        if not len(row):
            # no rows have come; gradients still go the way that they go on the other ranks
            output = rows * scales.sum(-1, keepdim=True).to(rows.dtype)
            for parameter in self.module.parameters():
                output = output + parameter.reshape(-1)[:0].sum().to(rows.dtype)
            return output
        inner = self.inner or self._own
        pairs = inner(
            rows[row], wanted[row, slot].unsqueeze(1), scales[row, slot].unsqueeze(1), *args, **kwargs
        )
        if not isinstance(pairs, Tensor) or pairs.shape != (len(row), rows.shape[1]):
            raise ParameterError(f"expert parallelism: {self.name} must return a tensor (tokens, width)")
        # ranks without rows send the tokens' dtype: under autocast, experts may return another
        return torch.zeros_like(rows).index_add(0, row, pairs.to(rows.dtype))

    def _own(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return found

    def _check(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(hidden):
            shapes = ", ".join(str(list(each.shape)) for each in (hidden, index, weights))
            raise ParameterError(
                f"expert parallelism: {self.name}: expected tokens (n, width), experts (n, k) and weights "
                f"(n, k), got shapes {shapes}"
            )
        check_kind(f"expert parallelism: {self.name}", index)
