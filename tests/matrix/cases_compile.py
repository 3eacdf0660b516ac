"""Define uses of torch.compile and torch.autocast."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.parts import Stack, layers
from tests.matrix.registry import feature
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, floats, run_steps, squared, train
from tests.runtime.models import Layer, with_forward


def _compiled(side: Side, backend: str, what: str) -> None:
    """Train with something compiled under the engine; plain torch runs it as it is."""
    torch._dynamo.reset()
    net = Stack(layers(2)).double()
    if side.is_plain:
        train(side, net)
        return
    if what == "blocks":
        for layer in net.layers:
            layer.compile(backend=backend)
    elif what == "wrapped blocks":
        net.around = lambda layer, x: torch.compile(layer, backend=backend)(x)
    elif what == "model":
        net.compile(backend=backend)
    elif what == "forward":
        with_forward(net, torch.compile(net.forward, backend=backend))
    trainer = side.start(net)
    if what == "step":
        loss = torch.compile(lambda x: squared(trainer.call(x)), backend=backend)
        run_steps(trainer, range(4), loss=lambda call, x: loss(x))
    elif what == "engine's module":
        call = torch.compile(trainer.module, backend=backend)
        run_steps(trainer, range(4), loss=lambda _, x: squared(call(x)))
    else:
        run_steps(trainer, range(4))
    torch._dynamo.reset()


for _backend, _whats in {
    "eager": ("blocks", "wrapped blocks", "model", "forward", "step", "engine's module"),
    "aot_eager": ("blocks", "model"),
    "inductor": ("blocks",),
}.items():
    for _what in _whats:
        feature("compile", f"{_what} {_backend}".replace(" ", "_").replace("'s", ""), seconds=240)(
            lambda side, b=_backend, w=_what: _compiled(side, b, w)
        )


@feature("compile", "wrapped_model_eager", seconds=240)
def wrapped(side: Side) -> None:
    """Give torch.compile's module to initialize."""
    torch._dynamo.reset()
    net = Stack(layers(2)).double()
    trainer = side.start(net if side.is_plain else torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    run_steps(trainer, range(4))
    if not side.is_plain:
        trainer.module = trainer.module._orig_mod  # names of parameters without a prefix
    torch._dynamo.reset()


@feature("compile", "checkpointed_blocks_aot_eager", seconds=240)
def checkpointed(side: Side) -> None:
    torch._dynamo.reset()
    net = Stack(
        layers(2), around=lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    ).double()
    if not side.is_plain:
        for layer in net.layers:
            layer.compile(backend="aot_eager")
    train(side, net)
    torch._dynamo.reset()


class Cast(Stack):
    """Runs its blocks under autocast."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def _cast(side: Side, net: nn.Module, around: bool, **options: Any) -> None:
    """Train in fp32 under autocast; fewer rows in a product round otherwise, so the comparison is loose."""

    def loss(call: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
            y = call(x.float())
        return squared(y.float())

    train(side, net, loss=loss, dtype=torch.float32, **options)


@feature("autocast", "inside_forward", tolerance=2e-2)
def inside(side: Side) -> None:
    _cast(side, Cast(), False)


@feature("autocast", "around_the_call", tolerance=2e-2)
def around(side: Side) -> None:
    _cast(side, Stack(), True)


@feature("autocast", "around_the_call_with_checkpointing", tolerance=2e-2)
def around_checkpointed(side: Side) -> None:
    first = nn.Linear(WIDTH, WIDTH)
    net = Stack(around=lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    net.layers.insert(0, first)
    _cast(side, net, True)


@feature("autocast", "block_used_twice", tolerance=2e-2)
def used_twice(side: Side) -> None:
    """Use weights whose cast copies autocast keeps for the second use."""
    _cast(side, Stack(around=lambda layer, x: layer(layer(x))), True)


@feature("autocast", "switched_off_in_a_block", tolerance=2e-2)
def switched_off(side: Side) -> None:
    class Exact(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    _cast(side, Stack(nn.ModuleList([Layer(WIDTH), Exact(WIDTH), Layer(WIDTH)])), True)


@feature("autocast", "evaluation_gives_the_same_as_plain_torch", tolerance=1e-3)
def evaluation(side: Side) -> None:
    net = Cast().float()
    x = floats(9)[0].float()
    wanted = copy.deepcopy(net)(x)
    trainer = side.start(net, dtype=torch.float32)
    with torch.no_grad():
        side.record("difference", (trainer.call(x) - wanted).abs().max())
