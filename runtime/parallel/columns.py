"""Computes linear layers that are sharded by columns, and sums their input's gradient beside the gradients of
weights.

Note [Sums beside weight gradients]
    The gradient of a value with which column layers compute is summed over the ranks, and all layers before
    them wait for the sum. Nothing waits for the gradients of weights. So the sum begins as soon as the layers
    have computed the gradients of the value, and the gradients of weights are computed while it runs:
    Megatron-LM's ``LinearWithGradAccumulationAndAsyncCommunication``. Megatron starts a sum for each layer;
    here, layers that compute with one value (query, key and value; gate and up) have one. The weight of the
    row layer behind them (the attention's output, down) also gets its gradient then.

    Of the nodes of its graph that are ready, autograd runs the one that was made last. The nodes are made in
    the opposite order of the backward pass:

    1. ``_Linear``, one for each layer, computes the gradient of its input and leaves the rest for 3.
    2. ``_Sum``, or ``_SumToShard``, begins the sum over the ranks.
    3. ``_Weight``, one for each layer, computes the gradient of the weight.
    4. ``_Wait`` waits for the sum.

    The output of ``_Weight`` is a token, an empty tensor. The layer takes it, so 3 is not ready before 1.
    Tokens are made before the layers are called, so all sharded layers of the module get one. Autograd never
    comes to a token that no layer has taken.

    A layer without a token computes all of its gradients in 1. So does each layer where gradients get a graph
    (``create_graph``); the sum is waited for at once then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm.axis import Axis, Channel
from ..comm.pending import DONE, Pending
from ..zero import placeholder
from .collectives import reduce_from, sum_to_shard


class _Shared:
    """Keeps what the nodes of one value leave for each other in a backward pass. The graph owns it, so it
    holds no tensor that has a graph.
    """

    __slots__ = ("_left", "work")

    def __init__(self) -> None:
        self.work: Pending = DONE
        """The sum that has begun."""
        self._left: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        """Holds the gradients and inputs that layers have left, by backward pass and layer: one pass may run
        inside of another, and what a failed pass leaves is never taken.
        """

    def leave(self, layer: int, gradient: Tensor, value: Tensor) -> None:
        """Leave what the gradient of a layer's weight is computed from: the gradient of its output (..., out)
        and its input (..., in).
        """
        self._left.setdefault((placeholder.backward_number(), layer), []).append((gradient, value))

    def take(self, layer: int) -> Tensor | None:
        """Return the gradient of a layer's weight; None if nothing was left."""
        found: Tensor | None = None
        for gradient, value in self._left.pop((placeholder.backward_number(), layer), ()):
            product = _rows(gradient).t() @ _rows(value)
            found = product if found is None else found.add_(product)
        return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, shared: _Shared) -> Tensor:
        ctx.shared = shared
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        work = ctx.shared.work
        ctx.shared.work = DONE
        work.wait()
        return gradient.contiguous(), None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shared: _Shared, layer: int) -> Tensor:
        ctx.shared = shared
        ctx.layer = layer
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.shared.take(ctx.layer), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis, channel: Channel, shared: _Shared) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        ctx.shared = shared
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            return reduce_from(gradient, ctx.axis, ctx.channel), None, None, None
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.shared.work = ctx.axis.begin_sum(total, ctx.channel)
        return total, None, None, None


class _SumToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis, channel: Channel, dim: int, shared: _Shared) -> Tensor:
        ctx.axis = axis
        ctx.channel = channel
        ctx.dim = dim
        ctx.shared = shared
        return torch.cat(axis.all_gather(shard.contiguous(), channel), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if torch.is_grad_enabled():
            return sum_to_shard(gradient, ctx.axis, ctx.channel, ctx.dim), None, None, None, None
        total, work = ctx.axis.begin_reduce_scatter(gradient.movedim(ctx.dim, 0), ctx.channel)
        ctx.shared.work = work
        return total.movedim(0, ctx.dim), None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor | None,
        shared: _Shared | None,
        layer: int,
    ) -> Tensor:
        ctx.shared = shared
        ctx.layer = layer
        ctx.of_weight = None if token is None else token.grad_fn
        ctx.save_for_backward(value, weight)
        return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        of_value = gradient @ weight
        of_bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        of_weight = None
        if torch.is_grad_enabled() or ctx.of_weight is None:
            of_weight = _rows(gradient).t() @ _rows(value)
        elif torch._C._will_engine_execute_node(ctx.of_weight):  # else nobody would take it
            # The gradient itself: of a tensor that somebody has, autograd adds nothing to the memory.
            ctx.shared.leave(ctx.layer, gradient, value.detach())
        # Not None: autograd would run _Weight in the thread of the CPU, beside the one of the GPU.
        token = None if ctx.of_weight is None else gradient.new_empty(0)
        return of_value, of_weight, of_bias, token, None, None


def compute(layer: nn.Linear, value: Tensor, bias: Tensor | None, shared: ColumnInput | None) -> Tensor:
    """Return what a sharded layer computes from a value.

    The gradient of its weight is computed beside the sum of ``shared``; without that, or if the layer belongs
    to another module, at once. Both save the same tensors, because a recomputation may find no ``shared``.
    """
    token = None if shared is None else shared.tokens.get(id(layer))
    nodes = None if shared is None else shared.nodes
    found: Tensor = _Linear.apply(value, layer.weight, bias, token, nodes, id(layer))  # type: ignore[no-untyped-call]  # torch does not type it
    return found


class ColumnInput:
    """Is a value with which column layers of a module compute: see Note [Sums beside weight gradients]."""

    def __init__(self, axis: Axis, channel: Channel, layers: Iterable[nn.Linear]) -> None:
        """``layers`` are the module's sharded layers; the sum runs over ``axis``."""
        self._axis = axis
        self._channel = channel
        self.nodes = _Shared()
        """Holds what the autograd nodes of the value share: the sum, and what layers have left."""
        self._layers = layers
        self.tokens: dict[int, Tensor] = {}
        """The tokens of layers whose weights train, by the layers' ids."""
        self._value: weakref.ref[Tensor] | None = None

    def copy(self, value: Tensor) -> Tensor:
        """Return a replicated value, for computing with this rank's shard."""
        return self._keep(_Sum.apply(self._prepare(value), self._axis, self._channel, self.nodes))  # type: ignore[no-untyped-call]  # torch does not type it

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """Return the ranks' shards, joined along a dimension, for computing with this rank's shard of
        weights.
        """
        waiting = self._prepare(shard)
        found = self._keep(_SumToShard.apply(waiting, self._axis, self._channel, dim, self.nodes))  # type: ignore[no-untyped-call]  # torch does not type it
        if self._axis.follow is not None:
            self._axis.follow(found, shard)
        return found

    def is_value(self, value: Tensor) -> bool:
        """Tell whether this is the value that :meth:`copy` or :meth:`gather` has returned."""
        return self._value is not None and self._value() is value

    def _prepare(self, value: Tensor) -> Tensor:
        waiting: Tensor = _Wait.apply(value, self.nodes)  # type: ignore[no-untyped-call]  # torch does not type it
        for layer in self._layers:
            if not layer.weight.requires_grad:
                continue
            token = _Weight.apply(layer.weight, self.nodes, id(layer))  # type: ignore[no-untyped-call]  # torch does not type it
            self.tokens[id(layer)] = token
        return waiting

    def _keep(self, value: Tensor) -> Tensor:
        self._value = weakref.ref(value)
        return value


def sums_early(value: Tensor) -> bool:
    """Tell whether the sum of a value's gradient may begin before gradients of weights are computed: not in a
    compiled graph, whose order the compiler chooses, nor under autocast, where products cast their inputs.
    """
    return (
        torch.is_grad_enabled()
        and value.requires_grad
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(value.device.type)
    )
