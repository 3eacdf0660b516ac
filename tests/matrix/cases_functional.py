"""Define uses of torch.func on modules that are under an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.matrix.parts import Stack
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, floats, squared, train

INSIDE = "ZLAUNCH_SAVED_TENSOR_HOOKS=0"
"""Transforms within a forward pass at stage 3 say what they need; test_lifetimes has them with it."""


@model("functional", "vmap_over_a_block")
def vmap() -> nn.Module:
    return Stack(around=lambda layer, x: torch.func.vmap(layer)(x))


@feature("functional", "vmap_over_the_model")
def vmap_model(side: Side) -> None:
    train(side, Stack(), loss=lambda call, x: squared(torch.func.vmap(call)(x)))


@model("functional", "grad_with_respect_to_inputs", may_refuse=INSIDE)
def grad() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda y: layer(y).square().mean((1, 2)).sum())(x)

    return Stack(around=around)


@model("functional", "jvp_with_respect_to_inputs")
def jvp() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        value, slope = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[:2]
        return value + 0.1 * slope

    return Stack(around=around)


@model("functional", "vjp_with_respect_to_inputs", may_refuse=INSIDE)
def vjp() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        value, back = torch.func.vjp(layer, x)[:2]
        return value + 0.1 * back(torch.ones_like(value))[0]

    return Stack(around=around)


@model("functional", "forward_mode")
def forward_mode() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            value, slope = torch.autograd.forward_ad.unpack_dual(layer(dual))
        return value + 0.1 * slope

    return Stack(around=around)


@model("functional", "call_with_tensors_of_a_hypernetwork")
def hypernetwork() -> nn.Module:
    class Hyper(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.randn(8) * 0.1)
            self.maker = nn.Linear(8, WIDTH * WIDTH + WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            made = self.maker(self.code)
            weight, bias = made[: WIDTH * WIDTH].view(WIDTH, WIDTH), made[WIDTH * WIDTH :]
            for layer in self.layers:
                x = layer(x)
            return functional_call(self.head, {"weight": weight, "bias": bias}, (x,))

    return Hyper()


@model("functional", "call_of_a_block_with_changed_parameters")
def changed() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        return functional_call(layer, {name: p * 0.9 for name, p in layer.named_parameters()}, (x,))

    return Stack(around=around)


@model("functional", "call_of_a_block_with_detached_parameters")
def detached() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        teacher = functional_call(layer, {n: p.detach() for n, p in layer.named_parameters()}, (x,))
        return layer(x) + 0.1 * teacher.detach()

    return Stack(around=around)


@feature("functional", "call_of_the_model_with_other_tensors", may_refuse="functional_call")
def whole(side: Side) -> None:
    """Evaluate the module with a copy of its first weights between steps."""
    net = Stack().double()
    first = {name: p.detach().clone() for name, p in net.named_parameters()}
    trainer = train(side, net, steps=2)
    with torch.no_grad():
        side.record_share("first", functional_call(trainer.module, first, (side.share(floats(9)[0]),)))
    train(side, Stack(), steps=1)


@model("functional", "ensemble_of_blocks")
def ensemble() -> nn.Module:
    class Ensemble(Stack):
        def forward(self, x: Tensor) -> Tensor:
            parameters, buffers = torch.func.stack_module_state(list(self.layers))
            one = self.layers[0]

            def call(p: Any, b: Any, y: Tensor) -> Tensor:
                return functional_call(one, (p, b), (y,))

            stacked = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
            return self.head(x + 0.1 * stacked.mean(0)) + self.layers[1](x)

    return Ensemble()


@model("functional", "gradients_per_sample", may_refuse=INSIDE)
def per_sample() -> nn.Module:
    """Use each sample's gradient of a block's parameters as a feature."""

    class PerSample(Stack):
        def forward(self, x: Tensor) -> Tensor:
            layer = self.layers[0]
            values = {name: p.detach() for name, p in layer.named_parameters()}

            def loss(p: Any, sample: Tensor) -> Tensor:
                return functional_call(layer, p, (sample,)).square().mean()

            grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
            norm = sum(g.flatten(1).square().sum(1) for g in grads.values())
            return super().forward(x) * (1 + norm.detach())[:, None, None]

    return PerSample()


@model("functional", "jacobian_of_a_block", may_refuse=INSIDE)
def jacobian() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(lambda y: layer(y).sum(-1)))(x[:, :2])
        return layer(x) * (1 + slopes.square().flatten(1).mean(1))[:, None, None]

    return Stack(around=around)
