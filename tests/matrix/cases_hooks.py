"""Define users' hooks and autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side, Trainer
from tests.matrix.train import WIDTH, floats, run_steps, squared


@model("hooks", "forward_pre")
def forward_pre() -> nn.Module:
    net = Stack()
    for module in (*net.layers, net):
        module.register_forward_pre_hook(lambda m, args: (args[0] * 0.9,))
    return net


@model("hooks", "forward_pre_with_keywords")
def forward_pre_keywords() -> nn.Module:
    net = Stack(around=lambda layer, x: layer(x=x))
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda m, a, kw: (a, {"x": kw["x"] * 0.9}), with_kwargs=True)
    return net


@model("hooks", "forward")
def forward() -> nn.Module:
    net = Stack()
    for module in (*net.layers, net):
        module.register_forward_hook(lambda m, args, out: out * 0.9 + args[0])
    return net


@model("hooks", "forward_that_reads_the_weight")
def forward_reads() -> nn.Module:
    net = Stack()
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda m, args: (args[0] + m.down.bias,), prepend=True)
        layer.register_forward_hook(lambda m, args, out: out * m.norm.weight)
    return net


@model("hooks", "full_backward")
def full_backward() -> nn.Module:
    net = Stack()
    for module in (*net.layers, net.head):
        module.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else g * 0.5 for g in gi))
    return net


@model("hooks", "full_backward_pre")
def full_backward_pre() -> nn.Module:
    net = Stack()
    for module in (*net.layers, net):
        module.register_full_backward_pre_hook(lambda m, go: tuple(g * 0.5 for g in go))
    return net


@model("hooks", "tensor")
def tensor() -> nn.Module:
    def around(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        y.register_hook(lambda g: g * 0.5)
        return y

    return Stack(around=around)


@model("hooks", "parameter_before_initialize")
def parameter() -> nn.Module:
    net = Stack()
    for own in net.parameters():
        own.register_hook(lambda g: g * 0.5)
    return net


def _with_hooks(side: Side, kind: str) -> Trainer:
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    for own in trainer.module.parameters():
        if kind == "gradient":
            own.register_hook(lambda g: g * 0.5)
        else:
            own.register_post_accumulate_grad_hook(_halve)
    run_steps(trainer, range(2, 5))
    return trainer


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None, "the hook sees no gradient"
    parameter.grad.mul_(0.5)


REFUSAL = r"\.grad is not available"


@feature("hooks", "parameter_after_initialize")
def parameter_after(side: Side) -> None:
    _with_hooks(side, "gradient")


@feature("hooks", "post_accumulate_before_initialize", may_refuse=REFUSAL)
def post_accumulate(side: Side) -> None:
    net = Stack()
    for own in net.parameters():
        own.register_post_accumulate_grad_hook(_halve)
    run_steps(side.start(net), range(4))


@feature("hooks", "post_accumulate_after_initialize", may_refuse=REFUSAL)
def post_accumulate_after(side: Side) -> None:
    _with_hooks(side, "post-accumulate")


@feature("hooks", "removed_in_the_middle")
def removed(side: Side) -> None:
    net = Stack()
    handles = [layer.register_forward_hook(lambda m, args, out: out * 0.5) for layer in net.layers]
    trainer = side.start(net)
    run_steps(trainer, range(2))
    for handle in handles:
        handle.remove()
    run_steps(trainer, range(2, 4))


@feature("hooks", "added_to_blocks_in_the_middle")
def added(side: Side) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    for layer in trainer.module.layers:
        layer.register_forward_pre_hook(lambda m, args: (args[0] + m.down.bias,))
    run_steps(trainer, range(2, 4))


@feature("hooks", "retained_gradient_of_an_activation")
def retained(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        y = trainer.call(side.share(floats(step)[0]))
        y.retain_grad()
        trainer.backward(squared(y))
        side.record_share(f"gradient {step}", y.grad * y.shape[0])
        trainer.step()


class SavedWeight(torch.autograd.Function):
    """Multiplies with a weight that it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class SavedView(torch.autograd.Function):
    """Multiplies with a weight of which it saves the transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        transposed = weight.t()
        ctx.save_for_backward(x, transposed)
        return x @ transposed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, transposed = ctx.saved_tensors
        return grad @ transposed.t(), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class KeptWeight(torch.autograd.Function):
    """Multiplies with a weight that it keeps as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class WithSetup(torch.autograd.Function):
    """Multiplies, with a context that is set up apart."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = SavedWeight.backward


class InPlace(torch.autograd.Function):
    """Doubles a tensor in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Applied(Layer):
    """Applies a Function to its weight."""

    function: Any = SavedWeight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.function.apply(x, self.up.weight[:WIDTH]) * 0.1


def _applied(function: Any) -> nn.Module:
    net = Stack(nn.ModuleList(Applied(WIDTH) for _ in range(3)))
    for layer in net.layers:
        layer.function = function
    return net


for _name, _function in {
    "function_that_saves_the_weight": SavedWeight,
    "function_that_saves_a_view": SavedView,
    "function_that_keeps_the_weight": KeptWeight,
    "function_with_setup_context": WithSetup,
}.items():
    model("hooks", _name)(lambda function=_function: _applied(function))


@model("hooks", "function_in_place_on_a_blocks_output")
def in_place() -> nn.Module:
    return Stack(around=lambda layer, x: InPlace.apply(layer(x)))


class Recomputing(torch.autograd.Function):
    """Runs a module without a graph, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), grad)
        return x.grad, None, *(None for _ in ctx.needs_input_grad[2:])


@model("hooks", "function_that_recomputes_a_block")
def recomputing() -> nn.Module:
    class Outer(Stack):
        first: nn.Linear

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = Recomputing.apply(x, layer)
            return self.head(x)

    net = Outer()
    net.first = nn.Linear(WIDTH, WIDTH)
    return net


@model("hooks", "function_that_takes_a_blocks_parameters")
def takes_parameters() -> nn.Module:
    class Grads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module, *parameters: Tensor) -> Tensor:
            ctx.module, ctx.count = module, len(parameters)
            ctx.save_for_backward(x, *parameters)
            with torch.no_grad():
                return module(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, *parameters = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                found = torch.autograd.grad(ctx.module(x), [x, *parameters], grad)
            return found[0], None, *found[1:]

    class Outer(Stack):
        first: nn.Linear

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = Grads.apply(x, layer, *layer.parameters())
            return self.head(x)

    net = Outer()
    net.first = nn.Linear(WIDTH, WIDTH)
    return net
