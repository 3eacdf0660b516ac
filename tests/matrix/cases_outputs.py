"""Define what blocks and models return."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pydantic
import torch
from torch import Tensor, nn

from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, squared, train


@dataclasses.dataclass
class Data:
    """Holds a tensor and something else."""

    y: Tensor
    note: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """Holds a tensor for good."""

    y: Tensor


class Named(NamedTuple):
    """Holds a tensor in a tuple."""

    y: Tensor
    note: str = "text"


class Own:
    """Holds a tensor as an attribute."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Slots:
    """Holds a tensor in a slot."""

    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Private:
    """Holds a tensor behind a property."""

    def __init__(self, y: Tensor) -> None:
        self._hidden = {"y": [y]}

    @property
    def y(self) -> Tensor:
        return self._hidden["y"][0]


class Model(pydantic.BaseModel):
    """Holds a tensor as a field."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    y: Tensor


class Mapped(collections.UserDict):  # type: ignore[type-arg]
    """Holds a tensor in a dictionary that is none."""


def _model_output(y: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=y)


def _deep(y: Tensor, depth: int = 25) -> Any:
    return y if not depth else [_deep(y, depth - 1)]


def _undeep(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def _field(value: Any) -> Tensor:
    return value.y


BOXES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda y: (y, None, 3), lambda v: v[0]),
    "list": (lambda y: ["text", y], lambda v: v[1]),
    "dict": (lambda y: {"note": 1, "y": y}, lambda v: v["y"]),
    "nested": (lambda y: {"a": [(1, {"y": y})]}, lambda v: v["a"][0][1]["y"]),
    "nested_25_deep": (_deep, _undeep),
    "ordered_dict": (lambda y: collections.OrderedDict(y=y), lambda v: v["y"]),
    "user_dict": (lambda y: Mapped(y=y), lambda v: v["y"]),
    "deque": (lambda y: collections.deque([y]), lambda v: v[0]),
    "dataclass": (Data, _field),
    "frozen_dataclass_with_slots": (Frozen, _field),
    "dataclass_in_a_list": (lambda y: [Data(None, Data(y))], lambda v: v[0].note.y),  # type: ignore[arg-type]
    "namedtuple": (Named, _field),
    "namespace": (lambda y: types.SimpleNamespace(y=y), _field),
    "own_class": (Own, _field),
    "own_class_in_a_tuple": (lambda y: (1, Own(y)), lambda v: v[1].y),
    "own_class_with_property": (Private, _field),
    "slots": (Slots, _field),
    "pydantic": (lambda y: Model(y=y), _field),
    "hugging_face_model_output": (_model_output, lambda v: v.last_hidden_state),
    "closure": (lambda y: lambda: y, lambda v: v()),
    "same_tensor_twice": (lambda y: (y, {"again": y}), lambda v: v[0] * 0.5 + v[1]["again"]),
    "view": (lambda y: y[:], lambda v: v),
    "views_of_one": (lambda y: y.unbind(-1), lambda v: torch.stack(v, -1)),
}


class Boxed(nn.Module):
    """Runs a module and puts its result into something."""

    def __init__(self, inner: nn.Module, box: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.box = inner, box

    def forward(self, x: Tensor) -> Any:
        return self.box(self.inner(x))


def _register(name: str) -> None:
    box, unbox = BOXES[name]

    def build() -> nn.Module:
        blocks = nn.ModuleList(Boxed(Layer(WIDTH), box) for _ in range(3))
        return Boxed(Stack(blocks, around=lambda layer, x: unbox(layer(x))), box)

    model("outputs", name, loss=lambda call, x: squared(unbox(call(x))))(build)


for _name in BOXES:
    _register(_name)


class Keeping(Stack):
    """Keeps its loss in an attribute."""

    result: Any = None
    loss: Tensor

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.loss = squared(y)
        return self.result(y) if self.result else None


@model("outputs", "none_and_the_loss_in_an_attribute", loss=lambda call, x: (call(x), call.loss)[1])
def none() -> nn.Module:
    return Keeping()


@model("outputs", "detached_and_the_loss_in_an_attribute", loss=lambda call, x: (call(x), call.loss)[1])
def detached() -> nn.Module:
    net = Keeping()
    net.result = Tensor.detach
    return net


@model("outputs", "number_and_the_loss_in_an_attribute", loss=lambda call, x: (call(x), call.loss)[1])
def number() -> nn.Module:
    net = Keeping()
    net.result = lambda y: y.mean().item()
    return net


class Storing(Layer):
    """Hands its result on through an attribute."""

    def forward(self, x: Tensor) -> Any:
        self.result = super().forward(x)


@model("outputs", "blocks_that_return_none")
def blocks_of_none() -> nn.Module:
    def around(layer: Any, x: Tensor) -> Tensor:
        layer(x)
        return layer.result

    return Stack(nn.ModuleList(Storing(WIDTH) for _ in range(3)), around=around)


@model("outputs", "blocks_that_append_to_a_list")
def appended() -> nn.Module:
    class Appending(Layer):
        def forward(self, xs: list[Tensor]) -> None:  # type: ignore[override]
            xs.append(super().forward(xs[-1]))

    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            xs = [x]
            for layer in self.layers:
                layer(xs)
            return self.head(torch.stack(xs).sum(0))

    return Outer(nn.ModuleList(Appending(WIDTH) for _ in range(3)))


@model("outputs", "block_that_returns_its_input")
def identity() -> nn.Module:
    class Sometimes(Layer):
        def forward(self, x: Tensor) -> Any:
            return x, super().forward(x)

    return Stack(
        nn.ModuleList(Sometimes(WIDTH) for _ in range(3)),
        around=lambda layer, x: (lambda v: v[0] + v[1])(layer(x)),
    )


@feature("outputs", "several_heads_with_losses_of_their_own")
def several(side: Side) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = Stack(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x)
            return self.a(y), self.b(y)

    train(side, Heads(), loss=lambda call, x: (lambda v: squared(v[0]) + 2 * squared(v[1]))(call(x)))
