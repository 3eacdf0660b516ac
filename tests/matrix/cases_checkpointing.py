"""Define uses of activation checkpointing, torch's and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, floats, run_steps, train

reentrant = functools.partial(checkpoint, use_reentrant=True)
plain = functools.partial(checkpoint, use_reentrant=False)


class First(Stack):
    """Has a layer before the blocks, so that their inputs need gradients."""

    def __init__(
        self, blocks: Any = None, around: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(blocks, around)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.first(x))


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant": lambda layer, x: reentrant(layer, x),
    "non_reentrant": lambda layer, x: plain(layer, x),
    "of_a_lambda": lambda layer, x: plain(lambda y: layer(layer(y)), x),
    "of_forward_itself": lambda layer, x: plain(layer.forward, x),
    "reentrant_of_forward_itself": lambda layer, x: reentrant(layer.forward, x),
    "nested": lambda layer, x: plain(lambda y: plain(layer, plain(layer, y)), x),
    "nested_reentrant": lambda layer, x: reentrant(lambda y: reentrant(layer, y) + y, x),
    "non_reentrant_in_reentrant": lambda layer, x: reentrant(lambda y: plain(layer, y) + y, x),
    "with_keywords": lambda layer, x: plain(lambda y, scale: layer(y) * scale, x, scale=0.5),
    "of_a_structure": lambda layer, x: plain(lambda y: {"a": (layer(y), 1)}, x)["a"][0],
    "zlaunch": lambda layer, x: zlaunch.checkpointing.checkpoint(layer, x),
    "zlaunch_of_a_lambda": lambda layer, x: zlaunch.checkpointing.checkpoint(lambda y: layer(y) + y, x),
    "without_random_state": lambda layer, x: plain(layer, x, preserve_rng_state=False),
    "with_work_after_it": lambda layer, x: plain(lambda y: layer(y).square().tanh(), x),
}


def _register(name: str) -> None:
    model("checkpointing", name)(lambda: First(around=WAYS[name]))


for _name in WAYS:
    _register(_name)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default)
    policy = torch_checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE


@model("checkpointing", "selective")
def selective() -> nn.Module:
    context = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, _policy)
    return First(around=lambda layer, x: plain(layer, x, context_fn=context))


@feature("checkpointing", "without_early_stop")
def no_early_stop(side: Side) -> None:
    trainer = side.start(First(around=WAYS["non_reentrant"]))
    with torch_checkpoint.set_checkpoint_early_stop(False):
        run_steps(trainer, range(4))


@model("checkpointing", "sequential")
def sequential() -> nn.Module:
    class Outer(First):
        def forward(self, x: Tensor) -> Tensor:
            x = torch_checkpoint.checkpoint_sequential(
                list(self.layers), 2, self.first(x), use_reentrant=False
            )
            return self.head(x)

    return Outer()


@model("checkpointing", "inside_a_block")
def inside() -> nn.Module:
    class Inner(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x + plain(lambda y: self.down(torch.tanh(self.up(y))), self.norm(x))

    return First(nn.ModuleList(Inner(WIDTH) for _ in range(3)))


@model("checkpointing", "of_a_method_of_the_root")
def of_a_method() -> nn.Module:
    class Outer(First):
        def body(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(plain(self.body, self.first(x)))

    return Outer()


@model("checkpointing", "with_frozen_blocks")
def with_frozen() -> nn.Module:
    net = First(around=WAYS["non_reentrant"])
    net.layers[1].requires_grad_(False)
    return net


@model("checkpointing", "reentrant_with_frozen_blocks")
def reentrant_with_frozen() -> nn.Module:
    net = First(around=WAYS["reentrant"])
    net.layers[:2].requires_grad_(False)
    return net


@model("checkpointing", "dropout_with_the_same_seed", same=True)
def dropout() -> nn.Module:
    return First(around=lambda layer, x: plain(lambda y: nn.functional.dropout(layer(y), 0.3), x))


@model("checkpointing", "block_used_again_outside")
def used_again() -> nn.Module:
    return First(around=lambda layer, x: layer(plain(layer, x)))


@model("checkpointing", "borrowed_weight_inside")
def borrowed() -> nn.Module:
    class Outer(First):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = plain(lambda y, layer=layer: layer(y) @ self.layers[0].up.weight[:WIDTH] + y, x)
            return self.head(x)

    return Outer()


@model("checkpointing", "two_micro_batches_and_clipping", accumulation=2, clip=0.5)
def accumulated() -> nn.Module:
    return First(around=WAYS["non_reentrant"])


@feature("checkpointing", "of_the_whole_model_in_the_loop")
def whole(side: Side) -> None:
    train(side, First(), loss=lambda call, x: plain(call, x).square().mean())


@feature("checkpointing", "of_the_loss_in_the_loop")
def of_the_loss(side: Side) -> None:
    train(side, First(), loss=lambda call, x: plain(lambda y: (call(y) - 0.3).square().mean(), x))


@feature("checkpointing", "reentrant_of_the_whole_model")
def reentrant_whole(side: Side) -> None:
    trainer = side.start(First())
    for step in range(4):
        x = side.share(floats(step)[0]).requires_grad_()
        trainer.backward(reentrant(trainer.call, x).square().mean())
        trainer.step()


@feature("checkpointing", "by_the_config")
def by_the_config(side: Side) -> None:
    train(side, First(), config={"activation_checkpointing": {"enabled": True}})


@feature("checkpointing", "by_the_config_in_groups")
def by_the_config_in_groups(side: Side) -> None:
    section = {"enabled": True, "number_checkpoints": 2}
    train(side, First(), config={"activation_checkpointing": section}, accumulation=2)
