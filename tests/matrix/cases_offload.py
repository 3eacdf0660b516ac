"""Define states and parameters that rest in host memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.matrix.parts import Stack, layers
from tests.matrix.registry import feature
from tests.matrix.sides import Side
from tests.matrix.train import floats, run_steps, train


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-6, weight_decay=0.1)


def _place(side: Side, device: str, **extra: Any) -> dict[str, Any]:
    return {"device": device, "nvme_path": str(side.folder), "pin_memory": False, **extra}


Sections = Callable[[Side], dict[str, Any]]
OPTIMIZER: dict[str, Sections] = {
    "optimizer_to_cpu": lambda side: {"offload_optimizer": _place(side, "cpu")},
    "half_of_the_optimizer_to_cpu": lambda side: {"offload_optimizer": _place(side, "cpu", ratio=0.5)},
    "optimizer_to_nvme": lambda side: {"offload_optimizer": _place(side, "nvme")},
    "half_of_the_optimizer_to_nvme": lambda side: {"offload_optimizer": _place(side, "nvme", ratio=0.5)},
}
PARAMETERS: dict[str, Sections] = {
    "parameters_to_cpu": lambda side: {"offload_param": _place(side, "cpu")},
    "parameters_to_nvme": lambda side: {"offload_param": _place(side, "nvme", max_in_cpu=0)},
    "everything_to_cpu": lambda side: {
        "offload_param": _place(side, "cpu"),
        "offload_optimizer": _place(side, "cpu"),
    },
    "everything_to_nvme": lambda side: {
        "offload_param": _place(side, "nvme", max_in_cpu=0),
        "offload_optimizer": _place(side, "nvme"),
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "_adamw": {"optimizer": _adamw},
    "_accumulation_and_clipping": {"accumulation": 2, "clip": 0.1},
}


def _register(name: str, sections: Sections, stages: tuple[int, ...]) -> None:
    for kind, options in KINDS.items():
        feature("offload", name + kind, stages=stages)(
            lambda side, options=options: train(side, Stack(), zero=sections(side), **options)
        )


for _name, _sections in OPTIMIZER.items():
    _register(_name, _sections, (1, 2, 3))
for _name, _sections in PARAMETERS.items():
    _register(_name, _sections, (3,))


class Turns(Stack):
    """Uses its blocks in turn."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.layers[self.calls % 3](x))


@feature("offload", "blocks_in_turn", stages=(1, 2, 3))
def turns(side: Side) -> None:
    train(side, Turns(), zero={"offload_optimizer": _place(side, "cpu")}, steps=6)


@feature("offload", "blocks_in_turn_on_nvme", stages=(3,))
def turns_on_disk(side: Side) -> None:
    train(side, Turns(), zero=PARAMETERS["everything_to_nvme"](side), steps=6)


@feature("offload", "tied_and_frozen_on_nvme", stages=(3,))
def tied(side: Side) -> None:
    net = Stack(layers(4))
    net.layers[3].up.weight = net.layers[0].up.weight
    net.layers[1].requires_grad_(False)
    train(side, net, zero=PARAMETERS["everything_to_nvme"](side))


@feature("offload", "checkpointed_blocks_on_nvme", stages=(3,))
def checkpointed(side: Side) -> None:
    net = Stack(around=lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    train(side, net, zero=PARAMETERS["everything_to_nvme"](side), accumulation=2)


@feature("offload", "evaluation_between", stages=(3,))
def evaluation(side: Side) -> None:
    trainer = side.start(Stack(), zero=PARAMETERS["everything_to_cpu"](side))
    for step in range(3):
        run_steps(trainer, range(step, step + 1))
        with torch.no_grad():
            side.record_share(f"output {step}", trainer.call(side.share(floats(50 + step)[0])))


@feature("offload", "weights_clipped_in_place", stages=(1, 2, 3))
def clipped(side: Side) -> None:
    trainer = side.start(Stack(), zero={"offload_optimizer": _place(side, "cpu")})
    for step in range(3):
        run_steps(trainer, range(step, step + 1))
        with trainer.editing(), torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.1, 0.1)


@feature("offload", "weights_clipped_in_place_on_nvme", stages=(3,))
def clipped_on_disk(side: Side) -> None:
    trainer = side.start(Stack(), zero=PARAMETERS["everything_to_nvme"](side))
    for step in range(3):
        run_steps(trainer, range(step, step + 1))
        with trainer.editing(), torch.no_grad():
            for parameter in trainer.module.parameters():
                nn.init.trunc_normal_(parameter, std=0.1) if step == 1 else parameter.clamp_(-0.1, 0.1)


@feature("offload", "checkpoint_in_the_middle", stages=(1, 2, 3))
def saved(side: Side) -> None:
    trainer = side.start(Stack(), zero={"offload_optimizer": _place(side, "nvme")}, optimizer=_adamw)
    run_steps(trainer, range(2))
    if not side.is_plain:
        trainer.call.save_checkpoint(str(side.folder / "saved"))
        with torch.no_grad():
            trainer.module.load_state_dict({n: v * 2 for n, v in trainer.values().items()})
        trainer.call.load_checkpoint(str(side.folder / "saved"))
    run_steps(trainer, range(2, 4))
