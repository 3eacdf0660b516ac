"""Define parameters and blocks that not every step uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.parts import Layer, Stack, layers
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, floats, run_steps, squared


class Chosen(Stack):
    """Runs the blocks that ``chosen(call)`` names."""

    def __init__(self, chosen: Callable[[int], list[int]], depth: int = 4) -> None:
        super().__init__(layers(depth))
        self.chosen, self.calls = chosen, 0

    def forward(self, x: Tensor) -> Tensor:
        for index in self.chosen(self.calls):
            x = self.layers[index](x)
        self.calls += 1
        return self.head(x)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make AdamW, which decays a parameter whether its gradient is zero or not."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, eps=1e-6)


@model("unused", "parameter")
def parameter() -> nn.Module:
    net = Stack()
    net.never = nn.Parameter(torch.ones(70, 70))
    return net


@model("unused", "parameter_of_a_block")
def parameter_of_a_block() -> nn.Module:
    net = Stack()
    net.layers[1].never = nn.Parameter(torch.ones(7))
    return net


@model("unused", "block")
def block() -> nn.Module:
    return Chosen(lambda call: [0, 1, 3])


@model("unused", "first_and_last_block")
def first_and_last() -> nn.Module:
    return Chosen(lambda call: [1, 2])


@model("unused", "block_with_adamw", optimizer=adamw)
def block_with_adamw() -> nn.Module:
    return Chosen(lambda call: [0, 1, 3])


@model("unused", "blocks_in_turn", steps=6)
def in_turn() -> nn.Module:
    return Chosen(lambda call: [0, 1 + call % 2, 3])


@model("unused", "blocks_in_turn_with_adamw", steps=6, optimizer=adamw)
def in_turn_with_adamw() -> nn.Module:
    return Chosen(lambda call: [0, 1 + call % 2, 3])


@model("unused", "block_from_the_third_step", steps=6)
def later() -> nn.Module:
    return Chosen(lambda call: [0, 1, 2, 3] if call >= 2 else [0, 3])


@model("unused", "block_until_the_third_step", steps=6)
def until() -> nn.Module:
    return Chosen(lambda call: [0, 1, 2, 3] if call < 2 else [0, 3])


@model("unused", "order_that_changes", steps=6)
def order() -> nn.Module:
    return Chosen(lambda call: [[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 3, 0]][call % 3])


@model("unused", "layer_drop_with_the_same_seed", steps=8)
def layer_drop() -> nn.Module:
    generator = torch.Generator().manual_seed(11)

    def chosen(call: int) -> list[int]:
        return [i for i in range(4) if float(torch.rand((), generator=generator)) > 0.4]

    return Chosen(chosen)


@model("unused", "parameter_used_at_even_steps", steps=6)
def even_parameter() -> nn.Module:
    class Even(Chosen):
        gain: nn.Parameter

        def forward(self, x: Tensor) -> Tensor:
            even = self.calls % 2 == 0
            x = super().forward(x)
            return x * self.gain if even else x

    net = Even(lambda call: [0, 1])
    net.gain = nn.Parameter(torch.full((WIDTH,), 1.2))
    return net


@model("unused", "in_the_second_of_two_micro_batches", accumulation=2)
def second_micro_batch() -> nn.Module:
    return Chosen(lambda call: [0, 1, 2, 3] if call % 2 else [0, 3])


@model("unused", "output_that_the_loss_does_not_need")
def dropped_output() -> nn.Module:
    class Dropping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[1](x)
            return self.head(self.layers[2](self.layers[0](x)))

    return Dropping()


@model("unused", "output_times_zero")
def times_zero() -> nn.Module:
    class Zero(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers[2](self.layers[0](x)) + 0.0 * self.layers[1](x))

    return Zero()


@model("unused", "frozen_block")
def frozen_block() -> nn.Module:
    net = Stack()
    net.layers[1].requires_grad_(False)
    return net


@model("unused", "frozen_first_blocks")
def frozen_first() -> nn.Module:
    net = Stack()
    net.layers[:2].requires_grad_(False)
    return net


@model("unused", "all_frozen_but_a_scalar")
def all_but_a_scalar() -> nn.Module:
    class Scaled(Stack):
        gain: nn.Parameter

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.gain)

    net = Scaled().requires_grad_(False)
    net.gain = nn.Parameter(torch.tensor(0.7))
    return net


@model("unused", "frozen_biases_in_every_block")
def frozen_biases() -> nn.Module:
    net = Stack()
    for name, own in net.named_parameters():
        own.requires_grad = not name.endswith("bias")
    return net


@feature("unused", "block_of_one_rank_only", stages=(0, 1, 2))
def one_rank(side: Side) -> None:
    class Choosing(Stack):
        def forward(self, x: Tensor, which: int = 0) -> Tensor:
            return self.head(self.layers[2](self.layers[which](x)))

    trainer = side.start(Choosing())
    for step in range(4):
        (batch,) = floats(step)
        if side.is_plain:
            pairs = zip(batch.chunk(side.world), range(side.world), strict=True)
            loss = torch.stack([squared(trainer.call(rows, rank)) for rows, rank in pairs]).mean()
        else:
            loss = squared(trainer.call(side.share(batch), side.rank))
        trainer.backward(loss)
        trainer.step()


@feature("unused", "everything_in_one_step")
def nothing(side: Side) -> None:
    """Take a step whose loss uses the head alone between usual ones."""
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    (batch,) = floats(2)
    trainer.backward(squared(trainer.module.head(side.share(batch))))
    trainer.step()
    run_steps(trainer, range(3, 5))


@model("unused", "many_small_unused_modules")
def many() -> nn.Module:
    net = Stack(nn.ModuleList([Layer(WIDTH), Layer(WIDTH)]))
    net.spare = nn.ModuleDict({f"m{i}": nn.Linear(3, 3) for i in range(10)})
    return net
