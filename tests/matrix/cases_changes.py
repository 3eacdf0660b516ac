"""Define what scripts change between steps: weights, flags, groups, rates, states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zlaunch
from tests.matrix.parts import Stack
from tests.matrix.registry import feature
from tests.matrix.sides import Side, Trainer
from tests.matrix.train import run_steps
from zlaunch.runtime.optim.schedules import SCHEDULES


def between(name: str, change: Callable[[Trainer, int], None], **options: Any) -> None:
    """Register a feature that does something after each step."""

    def run(side: Side) -> None:
        trainer = side.start(Stack(), **options)
        for step in range(5):
            run_steps(trainer, range(step, step + 1))
            change(trainer, step)

    feature("changes", name)(run)


def _edit(write: Callable[[nn.Parameter], Any]) -> Callable[[Trainer, int], None]:
    def change(trainer: Trainer, step: int) -> None:
        with trainer.editing(), torch.no_grad():
            for parameter in trainer.module.parameters():
                write(parameter)

    return change


between("weights_clipped_through_data", _edit(lambda p: p.data.clamp_(-0.1, 0.1)))
between("weights_clipped_in_place", _edit(lambda p: p.clamp_(-0.1, 0.1)))
between("weights_scaled_in_place", _edit(lambda p: p.mul_(0.9)))
between("weights_scaled_through_foreach", lambda trainer, step: _foreach(trainer))
between("weights_set_by_index", _edit(lambda p: p.view(-1).__setitem__(slice(0, 2), 0.05)))
between("weights_initialized_again", lambda trainer, step: _again(trainer) if step == 2 else None)
between("weights_written_by_copy_with_adam", _edit(lambda p: p.copy_(p * 0.9 + 0.01)), section={
    "type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-6}
}, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-6, weight_decay=0.0))  # fmt: skip


def _foreach(trainer: Trainer) -> None:
    with trainer.editing(), torch.no_grad():
        torch._foreach_mul_(list(trainer.module.parameters()), 0.9)


def _again(trainer: Trainer) -> None:
    with trainer.editing():
        torch.manual_seed(3)
        nn.init.normal_(trainer.module.head.weight, std=0.1)
        nn.init.zeros_(trainer.module.layers[0].up.bias)


def _gathered(trainer: Trainer) -> Any:
    return zlaunch.zero.GatheredParameters(list(trainer.module.parameters()))


@feature("changes", "moving_average")
def moving_average(side: Side) -> None:
    net = Stack().double()
    average = copy.deepcopy(net)
    trainer = side.start(net)
    for step in range(4):
        run_steps(trainer, range(step, step + 1))
        with _gathered(trainer), torch.no_grad():
            for kept, now in zip(average.parameters(), trainer.module.parameters(), strict=True):
                kept.mul_(0.9).add_(now, alpha=0.1)
    for name, value in average.state_dict().items():
        side.record(f"average {name}", value)


@feature("changes", "moving_average_by_torch", stages=(0, 1, 2))
def averaged_model(side: Side) -> None:
    net = Stack().double()
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    trainer = side.start(net)
    for step in range(4):
        run_steps(trainer, range(step, step + 1))
        average.update_parameters(trainer.module)
    for name, value in average.module.state_dict().items():
        side.record(f"average {name}", value)


@feature("changes", "moving_average_written_back")
def written_back(side: Side) -> None:
    net = Stack().double()
    slow = [p.detach().clone() for p in net.parameters()]
    trainer = side.start(net)
    for step in range(6):
        run_steps(trainer, range(step, step + 1))
        if step % 2:
            with trainer.editing(), torch.no_grad():
                for kept, now in zip(slow, trainer.module.parameters(), strict=True):
                    kept.lerp_(now, 0.5)
                    now.copy_(kept)


@feature("changes", "frozen_and_unfrozen")
def frozen(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(6):
        trainer.module.layers[1].requires_grad_(step not in (2, 3))
        trainer.module.layers[0].requires_grad_(step != 4)
        run_steps(trainer, range(step, step + 1))


@feature("changes", "frozen_parameter_by_parameter")
def frozen_parameters(side: Side) -> None:
    trainer = side.start(Stack())
    own = list(trainer.module.parameters())
    for step in range(6):
        for index, parameter in enumerate(own):
            parameter.requires_grad = index % 6 != step
        run_steps(trainer, range(step, step + 1))
    for parameter in own:
        parameter.requires_grad = True


@feature("changes", "all_but_the_head_frozen_for_a_while")
def head_first(side: Side) -> None:
    trainer = side.start(Stack())
    trainer.module.layers.requires_grad_(False)
    run_steps(trainer, range(2))
    trainer.module.layers.requires_grad_(True)
    run_steps(trainer, range(2, 5))


GROUPS = "add_param_group|frozen|requires_grad"


@feature("changes", "frozen_at_first_but_in_the_optimizer", may_refuse=GROUPS)
def unfrozen_later(side: Side) -> None:
    net = Stack()
    net.layers[1].requires_grad_(False)
    trainer = side.start(net, groups=lambda m: list(m.parameters()), client=True, optimizer=_sgd)
    run_steps(trainer, range(2))
    trainer.module.layers[1].requires_grad_(True)
    run_steps(trainer, range(2, 5))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


@feature("changes", "unfrozen_gradually_by_add_param_group", may_refuse=GROUPS)
def gradually(side: Side) -> None:
    net = Stack()
    net.layers.requires_grad_(False)
    trainer = side.start(net, groups=lambda m: list(m.head.parameters()), optimizer=_sgd)
    run_steps(trainer, range(2))
    for index in (2, 1):
        layer = trainer.module.layers[index]
        layer.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.02})
        run_steps(trainer, range(4 - index, 6 - index))


OURS: dict[str, Any] = dict(SCHEDULES)
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "WarmupLR": lambda o: OURS["WarmupLR"](o, warmup_max_lr=0.05, warmup_num_steps=4),
    "WarmupDecayLR": lambda o: OURS["WarmupDecayLR"](
        o, total_num_steps=6, warmup_max_lr=0.05, warmup_num_steps=3
    ),
    "WarmupCosineLR": lambda o: OURS["WarmupCosineLR"](o, total_num_steps=6, warmup_num_steps=3),
}


def _scheduled(side: Side, make: Callable[[Any], Any]) -> None:
    trainer = side.start(Stack(), scheduler=make)
    for step in range(5):
        run_steps(trainer, range(step, step + 1))
        side.record(f"rate {step}", trainer.optimizer.param_groups[0]["lr"])


for _name, _make in SCHEDULERS.items():
    feature("changes", f"schedule_{_name}")(lambda side, make=_make: _scheduled(side, make))


@feature("changes", "schedule_that_the_loop_steps")
def own_schedule(side: Side) -> None:
    trainer = side.start(Stack())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, patience=0, factor=0.5)
    for step in range(5):
        run_steps(trainer, range(step, step + 1))
        plateau.step([1.0, 2.0, 3.0, 2.0, 1.0][step])
        side.record(f"rate {step}", trainer.optimizer.param_groups[0]["lr"])


def _rate(trainer: Trainer, step: int) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"], group["weight_decay"], group["momentum"] = 0.05 / (2 + step), 0.1 * step, 0.5


between("rate_decay_and_momentum_by_hand", _rate)


@feature("changes", "state_dict_loaded_in_the_middle")
def state_loaded(side: Side) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    kept = trainer.values()
    run_steps(trainer, range(2, 4))
    trainer.module.load_state_dict(kept)
    run_steps(trainer, range(4, 6))


@feature("changes", "part_of_a_state_dict_loaded")
def part_loaded(side: Side) -> None:
    trainer = side.start(Stack())
    torch.manual_seed(5)
    other = Stack().double().state_dict()
    run_steps(trainer, range(2))
    part = {name: value for name, value in other.items() if name.startswith("layers.1")}
    trainer.module.load_state_dict(part, strict=False)
    run_steps(trainer, range(2, 4))


@feature("changes", "state_of_a_block_loaded")
def block_loaded(side: Side) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    state = {n: v.clone() for n, v in trainer.module.layers[0].state_dict().items()}
    trainer.module.layers[2].load_state_dict(state)
    run_steps(trainer, range(2, 4))


@feature("changes", "optimizer_state_dict_in_the_middle", may_refuse="save_checkpoint|load_checkpoint")
def optimizer_state(side: Side) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    kept, state = trainer.values(), copy.deepcopy(trainer.optimizer.state_dict())
    run_steps(trainer, range(2, 4))
    trainer.module.load_state_dict(kept)
    trainer.optimizer.load_state_dict(state)
    run_steps(trainer, range(4, 6))


def _checkpointed(side: Side, **options: Any) -> None:
    """Save, go on, load what was saved and go on from there."""
    trainer = side.start(Stack(), **options)
    run_steps(trainer, range(2))
    if not side.is_plain:
        trainer.call.save_checkpoint(str(side.folder), tag="kept")
        run_steps(trainer, range(50, 52))
        trainer.call.load_checkpoint(str(side.folder), tag="kept")
    run_steps(trainer, range(2, 5))
    for name in [name for name in side.records if name.startswith("loss 5")]:
        del side.records[name]


@feature("changes", "checkpoint_loaded_in_the_middle")
def checkpoint(side: Side) -> None:
    _checkpointed(side)


@feature("changes", "checkpoint_with_adam_and_a_schedule")
def checkpoint_adam(side: Side) -> None:
    _checkpointed(
        side,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-6),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )


@feature("changes", "checkpoint_loaded_by_a_new_engine")
def new_engine(side: Side) -> None:
    trainer = side.start(Stack())
    run_steps(trainer, range(2))
    if not side.is_plain:
        trainer.call.save_checkpoint(str(side.folder))
        side.close()
        torch.manual_seed(99)
        trainer = side.start(Stack())
        trainer.call.load_checkpoint(str(side.folder))
    run_steps(trainer, range(2, 5))


@feature("changes", "buffer_changed_by_hand")
def buffer(side: Side) -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    net = Scaled()
    net.register_buffer("scale", torch.ones(()))
    trainer = side.start(net)
    for step in range(4):
        trainer.module.scale.fill_(1.0 - 0.1 * step)
        run_steps(trainer, range(step, step + 1))


@feature("changes", "dropout_rate_and_mode")
def attributes(side: Side) -> None:
    class Switched(Stack):
        mode = "plain"

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.tanh() if self.mode == "tanh" else y

    trainer = side.start(Switched())
    for step in range(4):
        trainer.module.mode = "tanh" if step % 2 else "plain"
        run_steps(trainer, range(step, step + 1))


@feature("changes", "penalty_on_weights_in_the_loop", refuses={3: "shard|GatheredParameters"})
def penalty(side: Side) -> None:
    """Add a norm of the weights to the loss, outside of the forward pass."""
    trainer = side.start(Stack())
    for step in range(3):
        run_steps(
            trainer,
            range(step, step + 1),
            loss=lambda call, x: (
                call(x).square().mean() + 0.01 * sum(p.square().sum() for p in trainer.module.parameters())
            ),
        )
