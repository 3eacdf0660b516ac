"""Define parameters and modules that are used in more than one place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.matrix.parts import Layer, Stack, Tokens, layers
from tests.matrix.registry import model
from tests.matrix.train import WIDTH, tokens


@model("sharing", "tied_embeddings", data=tokens)
def tied_embeddings() -> nn.Module:
    net = Tokens()
    net.head.weight = net.embedding.weight
    return net


@model("sharing", "parameter_in_two_modules")
def parameter_in_two_modules() -> nn.Module:
    net = Stack()
    net.layers[2].up.weight = net.layers[0].up.weight
    return net


@model("sharing", "bias_in_all_blocks")
def bias_in_all_blocks() -> nn.Module:
    net = Stack()
    for layer in net.layers:
        layer.down.bias = net.head.bias
    return net


@model("sharing", "module_registered_twice")
def module_registered_twice() -> nn.Module:
    net = Stack()
    net.alias = net.layers[1]
    return net


@model("sharing", "block_twice_in_the_list")
def block_twice_in_the_list() -> nn.Module:
    a, b = Layer(WIDTH), Layer(WIDTH)
    return Stack(nn.ModuleList([a, b, a, b]))


@model("sharing", "block_called_several_times")
def block_called_several_times() -> nn.Module:
    return Stack(around=lambda layer, x: layer(layer(layer(x))))


@model("sharing", "block_called_several_times_alternating")
def alternating() -> nn.Module:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 1, 2, 1, 0, 2):
                x = self.layers[index](x)
            return self.head(x)

    return Twice()


class _Functional(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.layers[0].up.weight[:WIDTH])


@model("sharing", "weight_used_functionally_elsewhere")
def weight_used_functionally_elsewhere() -> nn.Module:
    net = _Functional()
    del net.head
    return net


@model("sharing", "weight_used_functionally_before_its_module")
def before_its_module() -> nn.Module:
    class Early(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.layers[2].down.bias + x @ self.layers[1].up.weight[:WIDTH])

    return Early()


@model("sharing", "transposed_tie")
def transposed_tie() -> nn.Module:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(2)
            self.encoder = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t())

    return Auto()


@model("sharing", "block_borrows_the_next_blocks_weight")
def borrows() -> nn.Module:
    class Borrowing(Layer):
        other: list[Layer]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.other[0].up.weight[:WIDTH])

    a, b = Borrowing(WIDTH), Layer(WIDTH)
    a.other = [b]  # not registered
    return Stack(nn.ModuleList([a, b, Layer(WIDTH)]))


@model("sharing", "shared_buffers")
def shared_buffers() -> nn.Module:
    class Scaled(Layer):
        scale: Tensor
        calls: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return super().forward(x) * self.scale

    net = Stack(nn.ModuleList(Scaled(WIDTH) for _ in range(3)))
    scale, calls = torch.full((WIDTH,), 1.1), torch.zeros((), dtype=torch.long)
    for layer in net.layers:
        layer.register_buffer("scale", scale)
        layer.register_buffer("calls", calls)
    return net


@model("sharing", "parameter_list_of_the_blocks_parameters")
def parameter_list() -> nn.Module:
    class Regularised(Stack):
        watched: nn.ParameterList

        def forward(self, x: Tensor) -> Tensor:
            penalty = sum(p.square().mean() for p in self.watched)
            return super().forward(x) + 0.1 * penalty

    net = Regularised()
    net.watched = nn.ParameterList([layer.up.weight for layer in net.layers])
    return net


@model("sharing", "two_models_in_one_module")
def siamese() -> nn.Module:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Stack()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.net(x.roll(1, -1) * 0.5).detach() + self.net(-x)

    return Siamese()
