"""Define ways to use autograd in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.matrix.parts import Stack
from tests.matrix.registry import feature
from tests.matrix.sides import Side, Trainer
from tests.matrix.train import floats, run_steps, squared, train
from tests.runtime.models import grad_of

Step = Callable[[Side, Trainer, Tensor], None]


def each_step(
    name: str, build: Callable[[], nn.Module] = Stack, *, steps: int = 4, **options: Any
) -> Callable[[Step], Step]:
    """Register a feature by what it does in one step before the optimizer's."""

    def register(step: Step) -> Step:
        def run(side: Side) -> None:
            trainer = side.start(build())
            for index in range(steps):
                step(side, trainer, side.share(floats(index)[0]))
                trainer.step()

        feature("autograd", name, **options)(run)
        return step

    return register


@each_step("gradient_penalty")
def gradient_penalty(side: Side, trainer: Trainer, x: Tensor) -> None:
    x = x.requires_grad_()
    y = trainer.call(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    trainer.backward(squared(y) + slope.square().mean())


@each_step("gradient_penalty_alone")
def gradient_penalty_alone(side: Side, trainer: Trainer, x: Tensor) -> None:
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(trainer.call(x).sin().sum(), x, create_graph=True)
    trainer.backward((slope.square().mean((1, 2)) - 1).square().mean())


@each_step("third_derivative")
def third(side: Side, trainer: Trainer, x: Tensor) -> None:
    x = x.requires_grad_()
    value = trainer.call(x).sum()
    for _ in range(2):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = slope.square().sum()
    trainer.backward(value / x.shape[0] / 100)


@each_step("gradient_penalty_inside_forward", lambda: Inside())
def penalty_inside(side: Side, trainer: Trainer, x: Tensor) -> None:
    trainer.backward(squared(trainer.call(x)))


class Inside(Stack):
    """Adds the slope of its blocks to their result: a force beside an energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


@feature("autograd", "force_in_evaluation")
def force_in_evaluation(side: Side) -> None:
    trainer = train(side, Inside())
    trainer.call.eval()
    with torch.no_grad():
        side.record_share("forces", trainer.call(side.share(floats(9)[0])))


def _same(index: int) -> Tensor:
    return floats(index)[0][:2]


@feature("autograd", "gradient_with_respect_to_parameters_and_its_norm")
def parameter_gradients(side: Side) -> None:
    trainer = side.start(Stack())
    head = list(trainer.module.head.parameters())
    for index in range(3):
        loss = squared(trainer.call(_same(index)))
        found = torch.autograd.grad(loss, head, create_graph=True)
        trainer.backward(loss + 0.1 * sum(g.square().sum() for g in found))
        trainer.step()


@feature("autograd", "gradient_with_respect_to_all_parameters")
def all_gradients(side: Side) -> None:
    trainer = side.start(Stack())
    own = list(trainer.module.parameters())
    for index in range(3):
        loss = squared(trainer.call(_same(index)))
        for name, grad in enumerate(torch.autograd.grad(loss, own, retain_graph=True)):
            side.record(f"gradient {index} {name}", grad)
        trainer.backward(loss)
        trainer.step()


@each_step("gradient_with_respect_to_inputs_between")
def adversarial(side: Side, trainer: Trainer, x: Tensor) -> None:
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(trainer.call(x).square().sum(), x)
    trainer.backward(squared(trainer.call((x + 0.1 * slope).detach())))


@each_step("gradient_of_the_inputs")
def of_the_inputs(side: Side, trainer: Trainer, x: Tensor) -> None:
    x = x.requires_grad_()
    trainer.backward(squared(trainer.call(x)))
    side.record_share(f"inputs {len(side.records)}", grad_of(x) * x.shape[0])


@each_step("retain_graph_twice")
def twice(side: Side, trainer: Trainer, x: Tensor) -> None:
    loss = squared(trainer.call(x))
    trainer.backward(loss, retain_graph=True)
    trainer.backward(loss)


@each_step("two_losses_one_after_the_other")
def two_losses(side: Side, trainer: Trainer, x: Tensor) -> None:
    y = trainer.call(x)
    trainer.backward(squared(y), retain_graph=True)
    trainer.backward(y.abs().mean())


@each_step("several_roots_of_one_backward")
def several_roots(side: Side, trainer: Trainer, x: Tensor) -> None:
    y = trainer.call(x)
    torch.autograd.backward([squared(y), y.abs().mean()])


@each_step("backward_with_a_gradient")
def with_gradient(side: Side, trainer: Trainer, x: Tensor) -> None:
    y = trainer.call(x)
    y.backward(torch.ones_like(y) / y.numel())


@each_step("backward_to_some_parameters")
def to_some(side: Side, trainer: Trainer, x: Tensor) -> None:
    squared(trainer.call(x)).backward(inputs=list(trainer.module.layers[0].parameters()))


class Middle(Stack):
    """Keeps what the second block returned."""

    def forward(self, x: Tensor) -> Any:
        self.middle = self.layers[1](self.layers[0](x))
        return self.head(self.layers[2](self.middle))


@each_step("loss_of_an_intermediate_attribute", Middle)
def intermediate(side: Side, trainer: Trainer, x: Tensor) -> None:
    y = trainer.call(x)
    trainer.backward(squared(y) + trainer.module.middle.square().mean())


@each_step("loss_of_an_intermediate_attribute_alone", Middle)
def intermediate_alone(side: Side, trainer: Trainer, x: Tensor) -> None:
    trainer.call(x)
    trainer.backward(squared(trainer.call.middle))


@each_step("inner_loss_alone", lambda: WithInner())
def inner_alone(side: Side, trainer: Trainer, x: Tensor) -> None:
    _, inner = trainer.call(x)
    trainer.backward(inner)


@each_step("inner_loss_and_then_the_other", lambda: WithInner())
def inner_then(side: Side, trainer: Trainer, x: Tensor) -> None:
    y, inner = trainer.call(x)
    trainer.backward(inner, retain_graph=True)
    trainer.backward(squared(y))


class WithInner(Middle):
    """Returns a loss of its middle as well."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, squared(self.middle)


@each_step("detached_in_the_middle", lambda: Detached())
def detached(side: Side, trainer: Trainer, x: Tensor) -> None:
    trainer.backward(squared(trainer.call(x)))


class Detached(Stack):
    """Learns in its last block only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[2](self.layers[1](self.layers[0](x)).detach()))


@each_step("first_blocks_without_grad", lambda: NoGrad())
def without_grad(side: Side, trainer: Trainer, x: Tensor) -> None:
    trainer.backward(squared(trainer.call(x)))


class NoGrad(Stack):
    """Runs its first blocks under no_grad, and again with gradients as a target."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layers[1](self.layers[0](x))
        return self.head(self.layers[2](target)) + 0.1 * (self.layers[0](x) - target)


@each_step("anomaly_mode")
def anomaly(side: Side, trainer: Trainer, x: Tensor) -> None:
    with torch.autograd.set_detect_anomaly(True):
        trainer.backward(squared(trainer.call(x)))


@each_step("in_place_on_outputs", lambda: Stack(around=lambda layer, x: layer(x).mul_(0.5).add_(0.1)))
def in_place(side: Side, trainer: Trainer, x: Tensor) -> None:
    y = trainer.call(x)
    y += 1
    y[..., 0] = 0.5
    trainer.backward(squared(y))


def _hooks(kind: str) -> Any:
    if kind == "identity":
        return saved_tensors_hooks(lambda t: t, lambda t: t)
    if kind == "clone":
        return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    if kind == "numpy":
        return saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)
    return save_on_cpu()


def _register(kind: str) -> None:
    class Hooked(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with _hooks(kind):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x)

    def step(side: Side, trainer: Trainer, x: Tensor) -> None:
        trainer.backward(squared(trainer.call(x)))

    def around(side: Side, trainer: Trainer, x: Tensor) -> None:
        with _hooks(kind):
            loss = squared(trainer.call(x))
        trainer.backward(loss)

    each_step(f"saved_tensors_hooks_{kind}_inside_forward", Hooked)(step)
    each_step(f"saved_tensors_hooks_{kind}_around_forward")(around)


for _kind in ("identity", "clone", "numpy", "save_on_cpu"):
    _register(_kind)


@feature("autograd", "backward_in_another_order_than_forward")
def other_order(side: Side) -> None:
    trainer = side.start(Stack())
    for index in range(3):
        losses = [squared(trainer.call(side.share(floats(10 * index + i)[0]))) for i in range(3)]
        for position in (1, 0, 2):
            trainer.backward(losses[position])
        trainer.step()


@feature("autograd", "backward_of_the_last_step_after_an_evaluation")
def evaluation_between(side: Side) -> None:
    """Run the model without gradients between a forward pass and its backward pass."""
    trainer = side.start(Stack())
    for index in range(3):
        loss = squared(trainer.call(side.share(floats(index)[0])))
        with torch.no_grad():
            side.record_share(f"evaluation {index}", trainer.call(side.share(floats(50 + index)[0])))
        trainer.backward(loss)
        trainer.step()


@feature("autograd", "loss_that_is_dropped")
def dropped(side: Side) -> None:
    trainer = side.start(Stack())
    for index in range(3):
        trainer.call(side.share(floats(50 + index)[0]))
        run_steps(trainer, range(index, index + 1))
