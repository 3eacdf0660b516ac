"""Define torch's and users' optimizers, and the ways to hand them over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.parts import Stack
from tests.matrix.registry import feature
from tests.matrix.sides import Side
from tests.matrix.train import WIDTH, run_steps, train

ELEMENTWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1}),
    "Adam_amsgrad": ("Adam", {"lr": 3e-3, "eps": 1e-6, "amsgrad": True}),
    "Adam_maximize": ("Adam", {"lr": 3e-3, "eps": 1e-6, "maximize": True}),
    "AdamW": ("AdamW", {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1}),
    "AdamW_amsgrad_maximize": ("AdamW", {"lr": 3e-3, "eps": 1e-6, "amsgrad": True, "maximize": True}),
    "AdamW_foreach": ("AdamW", {"lr": 3e-3, "eps": 1e-6, "foreach": True}),
    "AdamW_one_by_one": ("AdamW", {"lr": 3e-3, "eps": 1e-6, "foreach": False}),
    "AdamW_fused": ("AdamW", {"lr": 3e-3, "eps": 1e-6, "fused": True}),
    "AdamW_rate_as_tensor": ("AdamW", {"lr": torch.tensor(3e-3), "eps": 1e-6}),
    "SGD": ("SGD", {"lr": 0.05}),
    "SGD_weight_decay": ("SGD", {"lr": 0.05, "weight_decay": 0.1}),
    "SGD_momentum_dampening": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "SGD_nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD_maximize": ("SGD", {"lr": 0.01, "maximize": True}),
    "SGD_fused": ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "SGD_foreach": ("SGD", {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    "Adagrad": ("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "Adagrad_fused": ("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.1, "fused": True}),
    "Adadelta": ("Adadelta", {"lr": 1.0}),
    "Adamax": ("Adamax", {"lr": 2e-3, "eps": 1e-6}),
    "ASGD": ("ASGD", {"lr": 0.01, "t0": 2}),
    "NAdam": ("NAdam", {"lr": 2e-3, "eps": 1e-6, "decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {"lr": 1e-2, "eps": 1e-6}),
    "RMSprop": ("RMSprop", {"lr": 1e-3, "eps": 1e-6, "momentum": 0.5, "centered": True}),
    "Rprop": ("Rprop", {"lr": 1e-3}),
}


def _register(name: str, kind: str, options: dict[str, Any]) -> None:
    make = functools.partial(getattr(torch.optim, kind), **options)
    feature("optimizers", name)(lambda side: train(side, Stack(), optimizer=make, steps=6))
    if name in ("Adam_amsgrad", "Adagrad", "NAdam", "RAdam", "SGD_nesterov", "Rprop"):
        feature("optimizers", f"{name}_as_an_instance")(
            lambda side: train(side, Stack(), optimizer=make, client=True, clip=0.1)
        )


for _name, (_kind, _options) in ELEMENTWISE.items():
    _register(_name, _kind, _options)


class Lion(torch.optim.Optimizer):
    """Follows the paper's algorithm 2."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(mean.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 0.01)


SECTIONS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "Adam_is_decoupled": (
        {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1}},
        functools.partial(torch.optim.AdamW, lr=3e-3, eps=1e-6, weight_decay=0.1),
    ),
    "Adam_with_l2": (
        {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": False}},
        functools.partial(torch.optim.Adam, lr=3e-3, eps=1e-6, weight_decay=0.1),
    ),
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}},
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "RMSprop": (
        {"type": "RMSprop", "params": {"lr": 1e-3, "eps": 1e-6, "momentum": 0.5}},
        functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-6, momentum=0.5),
    ),
    "Lion": (
        {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        functools.partial(Lion, lr=1e-3, weight_decay=0.1),
    ),
}
for _name, (_section, _make) in SECTIONS.items():
    feature("optimizers", f"config_{_name}")(
        lambda side, section=_section, make=_make: train(side, Stack(), optimizer=make, section=section)
    )


def _two_groups(net: nn.Module) -> list[Any]:
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "lr": 0.02, "momentum": 0.5},
    ]


def _three_groups(net: Any) -> list[Any]:
    return [
        {"params": list(net.layers[1].parameters()), "lr": 0.0},
        {"params": net.head.parameters(), "lr": 0.02},
        {"params": [*net.layers[0].parameters(), *net.layers[2].parameters()]},
    ]


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
for _name, _groups in {"two_groups": _two_groups, "three_groups": _three_groups}.items():
    feature("optimizers", f"{_name}_and_a_callable")(
        lambda side, groups=_groups: train(side, Stack(), groups=groups, optimizer=SGD)
    )
    feature("optimizers", f"{_name}_and_an_instance")(
        lambda side, groups=_groups: train(side, Stack(), groups=groups, optimizer=SGD, client=True)
    )
    feature("optimizers", f"{_name}_and_a_config")(
        lambda side, groups=_groups: train(
            side,
            Stack(),
            groups=groups,
            optimizer=SGD,
            section={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        )
    )


@feature("optimizers", "group_with_frozen_parameters")
def frozen(side: Side) -> None:
    net = Stack()
    net.layers[1].requires_grad_(False)
    train(side, net, groups=_two_groups, optimizer=SGD, client=True)


@feature("optimizers", "parameters_left_out")
def left_out(side: Side) -> None:
    """Train some of the parameters that need gradients."""
    train(side, Stack(), groups=lambda m: list(m.layers[1].parameters()), optimizer=SGD)


@feature("optimizers", "empty_group")
def empty_group(side: Side) -> None:
    train(side, Stack(), groups=lambda m: [{"params": []}, {"params": m.parameters()}], optimizer=SGD)


@feature("optimizers", "instance_with_earlier_steps", may_refuse="already has state")
def earlier_steps(side: Side) -> None:
    net = Stack().double()
    optimizer = SGD(net.parameters())
    for _ in range(2):
        net(torch.ones(2, 3, WIDTH, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    train(side, net, optimizer=lambda parameters: optimizer, client=True)


class Signs(torch.optim.Optimizer):
    """Follows the signs of a running mean: an optimizer of the user's that treats every element by itself."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_(torch.tanh(mean * 100), alpha=-group["lr"])


class Rows(torch.optim.Optimizer):
    """Divides each gradient by its norm: an optimizer of the user's that needs whole parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = parameter.grad.norm() + 1e-3
                    parameter.add_(parameter.grad / norm, alpha=-group["lr"])


UNTESTED = dict.fromkeys((1, 2, 3), "zero_allow_untested_optimizer")


@feature("optimizers", "own", refuses=UNTESTED)
def own(side: Side) -> None:
    train(side, Stack(), optimizer=Signs)


@feature("optimizers", "own_instance", refuses=UNTESTED)
def own_instance(side: Side) -> None:
    train(side, Stack(), optimizer=Signs, client=True)


@feature("optimizers", "own_allowed")
def own_allowed(side: Side) -> None:
    config = {"zero_allow_untested_optimizer": True}
    train(side, Stack(), optimizer=Signs, client=True, config=config)


@feature("optimizers", "own_that_needs_whole_parameters", refuses=UNTESTED)
def own_whole(side: Side) -> None:
    train(side, Stack(), optimizer=Rows)


class Matrices(nn.Module):
    """Has matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(72, 72, bias=False) for _ in range(3))
        self.first = nn.Linear(WIDTH, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@feature("optimizers", "Adafactor")
def adafactor(side: Side) -> None:
    train(side, Stack(), optimizer=functools.partial(torch.optim.Adafactor, lr=1e-2))


@feature("optimizers", "Adafactor_with_clipping_and_accumulation")
def adafactor_clipped(side: Side) -> None:
    make = functools.partial(torch.optim.Adafactor, lr=1e-2)
    train(side, Stack(), optimizer=make, client=True, clip=0.1, accumulation=2)


@feature("optimizers", "Muon")
def muon(side: Side) -> None:
    train(side, Matrices(), optimizer=functools.partial(torch.optim.Muon, lr=1e-2))


@feature("optimizers", "LBFGS", refuses="LBFGS")
def lbfgs(side: Side) -> None:
    train(side, Stack(), optimizer=torch.optim.LBFGS)


@feature("optimizers", "SparseAdam", refuses="SparseAdam")
def sparse_adam(side: Side) -> None:
    train(side, Stack(), optimizer=torch.optim.SparseAdam)


@feature("optimizers", "step_hooks")
def hooks(side: Side) -> None:
    """Register hooks around the optimizer's step."""
    trainer = side.start(Stack(), optimizer=SGD)
    calls: list[str] = []
    trainer.optimizer.register_step_pre_hook(lambda o, a, k: calls.append("before"))
    trainer.optimizer.register_step_post_hook(lambda o, a, k: calls.append("after"))
    run_steps(trainer, range(3))
    side.record("calls", len(calls))
