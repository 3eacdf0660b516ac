"""Define parameters of unusual shapes and layouts, and modules that hold them in unusual ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.matrix.parts import Layer, Stack, layers
from tests.matrix.registry import model
from tests.matrix.train import WIDTH, floats, vectors


class With(Stack):
    """Runs a stack on an input that ``change`` made with the module's own parameters."""

    def change(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(x))


@model("shapes", "scalars")
def scalars() -> nn.Module:
    class Own(With):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))

        def change(self, x: Tensor) -> Tensor:
            return x * self.gain + self.shift

    return Own()


@model("shapes", "empty_parameters")
def empty() -> nn.Module:
    class Own(With):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(0))

        def change(self, x: Tensor) -> Tensor:
            return x + self.a.sum() + self.b.sum()

    return Own()


@model("shapes", "empty_linear_of_a_block")
def empty_linear() -> nn.Module:
    class Hollow(Layer):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.none = nn.Linear(WIDTH, 0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.none(x).sum()

    return Stack(nn.ModuleList([Hollow(), Layer(WIDTH)]))


@model("shapes", "odd_sizes", data=lambda step: floats(step, 23))
def odd() -> nn.Module:
    return Stack(width=23, blocks=nn.ModuleList(Wide(23, 101) for _ in range(3)))


class Wide(nn.Module):
    """Runs two linear layers around a wide middle."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, middle), nn.Linear(middle, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


@model("shapes", "one_element")
def one_element() -> nn.Module:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    return One()


@model("shapes", "one_scalar")
def one_scalar() -> nn.Module:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    return One()


@model("shapes", "fewer_elements_than_ranks_in_each_block")
def few() -> nn.Module:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.9]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.weight)

    return nn.Sequential(*(Tiny() for _ in range(5)))


@model("shapes", "not_contiguous")
def not_contiguous() -> nn.Module:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter((torch.randn(100, WIDTH) * 0.1).t())
            self.b = nn.Parameter((torch.randn(200, WIDTH) * 0.1)[::2])

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(x @ self.a) @ self.b

    return Stack(nn.ModuleList(Strided() for _ in range(2)))


@model("shapes", "views_of_one_tensor")
def views() -> nn.Module:
    class Views(With):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(2 * WIDTH) * 0.1
            self.a, self.b = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[WIDTH:])

        def change(self, x: Tensor) -> Tensor:
            return x * (1 + self.a) + self.b

    return Views()


@model("shapes", "five_dimensions")
def five() -> nn.Module:
    class Five(With):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 3, 4, 2, 3) * 0.1)

        def change(self, x: Tensor) -> Tensor:
            return x * self.w.square().sum() + self.w.sum((0, 1)).reshape(-1)

    return Five()


@model("shapes", "parameter_list")
def parameter_list() -> nn.Module:
    class Listed(With):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.full((WIDTH,), 1.0 + i / 10) for i in range(4)])

        def change(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x * scale
            return x

    return Listed()


@model("shapes", "parameter_list_of_large_ones", data=lambda step: vectors(step, 72))
def large_list() -> nn.Module:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(72, 72) * 0.1 for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x + torch.tanh(x @ weight)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Listed(), Listed()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    return Outer()


@model("shapes", "parameter_lists_in_a_list", data=lambda step: vectors(step, 72))
def lists_in_a_list() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ModuleList(
                nn.ParameterList([torch.randn(72, 72) * 0.1 for _ in range(2)]) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for weights in self.weights:
                for weight in weights:  # type: ignore[attr-defined]  # a ParameterList
                    x = x + torch.tanh(x @ weight)
            return x

    return Own()


@model("shapes", "parameter_dict")
def parameter_dict() -> nn.Module:
    class Own(With):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.ParameterDict({"gain": torch.full((WIDTH,), 1.1), "shift": torch.zeros(WIDTH)})

        def change(self, x: Tensor) -> Tensor:
            return x * self.d["gain"] + self.d["shift"]

    return Own()


@model("shapes", "nested_sequential")
def nested() -> nn.Module:
    def pair() -> nn.Module:
        return nn.Sequential(Layer(WIDTH), nn.Tanh(), nn.Sequential(Layer(WIDTH)))

    return nn.Sequential(pair(), nn.Identity(), nn.Sequential(pair(), nn.Linear(WIDTH, 3)))


@model("shapes", "module_dict")
def module_dict() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": Layer(WIDTH), "b": Layer(WIDTH), "head": nn.Linear(WIDTH, 2)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["head"](self.parts["b"](self.parts["a"](x)))

    return Own()


@model("shapes", "single_linear")
def single_linear() -> nn.Module:
    return nn.Linear(WIDTH, 7)


@model("shapes", "single_large_linear", data=lambda step: vectors(step, 72))
def single_large_linear() -> nn.Module:
    return nn.Linear(72, 72)


@model("shapes", "single_block")
def single_block() -> nn.Module:
    return Layer(WIDTH)


@model("shapes", "no_blocks")
def no_blocks() -> nn.Module:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(WIDTH, 200) * 0.1)
            self.b = nn.Parameter(torch.randn(200, WIDTH) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.a) @ self.b

    return Bare()


@model("shapes", "very_deep", steps=3)
def very_deep() -> nn.Module:
    return Stack(layers(40))


@model("shapes", "blocks_in_blocks")
def blocks_in_blocks() -> nn.Module:
    class Group(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))
            self.layers = layers(2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * self.gain
            return x

    return Stack(nn.ModuleList([Group(), Group()]))


@model("shapes", "module_list_that_is_called_by_a_child")
def child_calls() -> nn.Module:
    class Runner(nn.Module):
        def forward(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
            for one in blocks:
                x = one(x)
            return x

    class Own(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.runner = Runner()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.runner(self.layers, x))

    return Own()
