"""Define parametrizations, old weight norms, and modules that return their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, run_steps, train


def _changed(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Give a stack whose linear layers were changed."""
    net = Stack()
    for layer in net.layers:
        layer.up, layer.down = change(layer.up), change(layer.down)
    return net


@model("layers", "weight_norm")
def weight_norm() -> nn.Module:
    return _changed(parametrizations.weight_norm)


@model("layers", "spectral_norm", same=True)
def spectral_norm() -> nn.Module:
    return _changed(parametrizations.spectral_norm)


@model("layers", "orthogonal", tolerance=1e-7)
def orthogonal() -> nn.Module:
    return _changed(parametrizations.orthogonal)


@feature("layers", "weight_norm_cached")
def cached(side: Side) -> None:
    trainer = side.start(_changed(parametrizations.weight_norm))
    for step in range(3):
        with parametrize.cached():
            run_steps(trainer, range(step, step + 1))


@model("layers", "own_parametrization")
def own_parametrization() -> nn.Module:
    class Symmetric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.1))

        def forward(self, x: Tensor) -> Tensor:
            return (x.triu() + x.triu(1).transpose(-1, -2)) * self.gain

    net = Stack(nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(WIDTH)) for _ in range(2)))
    for block in net.layers:
        parametrize.register_parametrization(block[0], "weight", Symmetric())
    return net


def _old(function: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def apply(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(module.double())

    return apply


@model("layers", "old_weight_norm")
def old_weight_norm() -> nn.Module:
    return _changed(_old(nn.utils.weight_norm))


@model("layers", "old_spectral_norm", same=True)
def old_spectral_norm() -> nn.Module:
    return _changed(_old(nn.utils.spectral_norm))


@model("layers", "weight_standardised_in_the_forward_pass")
def standardised() -> nn.Module:
    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean(1, keepdim=True)
            return F.linear(x, weight / (weight.std(1, keepdim=True) + 1e-3), self.bias)

    def change(linear: Any) -> nn.Module:
        return Standardised(linear.in_features, linear.out_features)

    return _changed(change)


class Positions(nn.Module):
    """Returns something made of its own large parameter."""

    def __init__(self, give: Callable[[nn.Parameter, int], Any]) -> None:
        super().__init__()
        self.pe = nn.Parameter(torch.randn(1, 200, WIDTH) * 0.1)
        self.give = give

    def forward(self, length: int) -> Any:
        return self.give(self.pe, length)


GIVES: dict[str, tuple[Callable[[nn.Parameter, int], Any], Callable[[Any], Tensor]]] = {
    "slice": (lambda p, n: p[:, :n], lambda v: v),
    "expanded": (lambda p, n: p[:, :n].expand(2, -1, -1), lambda v: v.mean(0, keepdim=True)),
    "index": (lambda p, n: p[0], lambda v: v[:5]),
    "detached": (lambda p, n: p.detach(), lambda v: v[:, :5]),
    "data": (lambda p, n: p.data[:, :n], lambda v: v),
    "slice_in_a_tuple": (lambda p, n: (n, p[:, :n]), lambda v: v[1]),
    "slice_in_an_object": (lambda p, n: SimpleNamespace(y=p[:, :n]), lambda v: v.y),
    "parameter_itself": (lambda p, n: p, lambda v: v[:, :5]),
    "parameter_itself_in_a_dict": (lambda p, n: {"p": p}, lambda v: v["p"][:, :5]),
    "transposed": (lambda p, n: p.transpose(1, 2), lambda v: v.transpose(1, 2)[:, :5]),
    "unbound": (lambda p, n: p[0].unbind(0), lambda v: torch.stack(v[:5])),
    "copy": (lambda p, n: p[:, :n].clone(), lambda v: v),
}


def _register(name: str) -> None:
    give, take = GIVES[name]

    class Positioned(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions(give)

        def forward(self, x: Tensor) -> Tensor:
            own = self.positions(x.shape[1])
            for layer in self.layers:  # other blocks come and go meanwhile
                x = layer(x)
            return self.head(x * (1 + take(own)))

    model("layers", f"returns_its_parameter_{name}")(Positioned)


for _name in GIVES:
    _register(_name)


@model("layers", "view_of_a_blocks_parameter_kept_in_an_attribute")
def kept_view() -> nn.Module:
    class Keeping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up.weight[:WIDTH]
            return super().forward(x)

    class Using(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.linear(x, self.layers[0].kept)

    return Using(nn.ModuleList(Keeping(WIDTH) for _ in range(3)))


@model("layers", "block_called_through_forward_directly")
def direct_forward() -> nn.Module:
    return Stack(around=lambda layer, x: layer.forward(x))


@model("layers", "method_of_a_block_other_than_forward")
def method() -> nn.Module:
    class Split(Layer):
        def first(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(self.norm(x)))

        def second(self, x: Tensor) -> Tensor:
            return F.linear(x, self.down.weight, self.down.bias)

    blocks = nn.ModuleList(Split(WIDTH) for _ in range(3))

    def around(layer: Any, x: Tensor) -> Tensor:
        return x + layer.second(layer.first(x))

    return Stack(blocks, around=around)


@model("layers", "weights_stacked_over_blocks")
def stacked() -> nn.Module:
    class Stacked(Stack):
        def forward(self, x: Tensor) -> Tensor:
            up = torch.stack([layer.up.weight for layer in self.layers])
            down = torch.stack([layer.down.weight for layer in self.layers])
            hidden = torch.tanh(torch.einsum("bli,khi->kblh", x, up))
            return self.head(torch.einsum("kblh,koh->blo", hidden, down))

    return Stacked()


@model("layers", "penalty_inside_forward")
def penalty() -> nn.Module:
    class Penalised(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * sum(p.square().sum() for p in self.parameters())

    return Penalised()


@model("layers", "norm_of_weights_inside_forward_without_grad")
def norm_inside() -> nn.Module:
    class Normed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                total = sum(float(p.norm()) for p in self.parameters())
            return super().forward(x) / (1 + total / 100)

    return Normed()


@feature("layers", "renamed_forward")
def renamed(side: Side) -> None:
    """Replace a block's forward on the instance."""
    net = Stack()
    inner = net.layers[1].forward
    net.layers[1].forward = lambda x: inner(x) * 0.5
    train(side, net)


@feature("layers", "training_flag_and_children_as_before")
def flags(side: Side) -> None:
    trainer = train(side, Stack(), steps=1)
    names = sorted(name for name, _ in trainer.module.named_modules())
    side.record("modules", len(names))
    trainer.call.eval()
    side.record("training", any(m.training for m in trainer.module.modules()))
    side.record("count", sum(p.numel() for p in trainer.module.parameters()))
    side.record("classes", all(isinstance(p, nn.Parameter) for p in trainer.module.parameters()))
