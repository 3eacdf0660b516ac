"""Define ways to build models for an engine, reach into them, and end the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import zlaunch
from tests.matrix.parts import Layer, Stack, Tokens
from tests.matrix.registry import feature
from tests.matrix.sides import Side, settings
from tests.matrix.train import WIDTH, floats, run_steps, squared, tokens, train


@contextmanager
def _in_double() -> Iterator[None]:
    """Make fp64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _built(side: Side, build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """Build a model inside zero.Init; for plain torch, as it is."""
    with _in_double():
        if side.is_plain:
            return build()
        with zlaunch.zero.Init(config_dict_or_path=settings(side.stage or 0), **options):
            return build()


@feature("init", "zero_init")
def zero_init(side: Side) -> None:
    train(side, _built(side, Stack), dtype=None)


@feature("init", "zero_init_with_other_seeds_on_other_ranks")
def other_seeds(side: Side) -> None:
    if not side.is_plain and side.rank:
        torch.manual_seed(99)
    train(side, _built(side, Stack), dtype=None)


class Initialised(Tokens):
    """Ties, copies and initializes at the end of its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.apply(self._init)
        with torch.no_grad():
            self.layers[1].up.weight.copy_(self.layers[0].up.weight)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(0.9)


@feature("init", "zero_init_of_a_model_that_initializes_itself")
def self_made(side: Side) -> None:
    train(side, _built(side, Initialised), dtype=None, data=tokens)


@feature("init", "zero_init_with_the_dtype", stages=(3,))
def with_dtype(side: Side) -> None:
    if side.is_plain:
        train(side, Stack())
        return
    with zlaunch.zero.Init(config_dict_or_path=settings(3), dtype=torch.float64):
        net = Stack()
    train(side, net, dtype=None)


@feature("init", "zero_init_nested", stages=(3,))
def nested(side: Side) -> None:
    def build() -> nn.Module:
        net = Stack()
        net.layers[1] = _built(side, lambda: Layer(WIDTH))
        return net

    train(side, _built(side, build), dtype=None)


@feature("init", "zero_init_of_a_part", stages=(3,))
def part(side: Side) -> None:
    with _in_double():
        net = Stack()
    net.layers[1] = _built(side, lambda: Layer(WIDTH))
    train(side, net, dtype=None)


@feature("init", "zero_init_of_a_module_that_exists", stages=(3,))
def exists(side: Side) -> None:
    net = Stack().double()
    if not side.is_plain:
        zlaunch.zero.Init(module=net, config_dict_or_path=settings(3))
    train(side, net, dtype=None)


@feature("init", "zero_init_and_gathered_before_initialize", stages=(3,))
def gathered_before(side: Side) -> None:
    net = _built(side, Stack)
    with zlaunch.zero.GatheredParameters(list(net.parameters()), modifier_rank=0), torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    train(side, net, dtype=None)


@feature("init", "zero_init_and_a_state_dict", stages=(0, 1, 2))
def state_dict(side: Side) -> None:
    torch.manual_seed(3)
    state = Stack().double().state_dict()
    net = _built(side, Stack)
    net.load_state_dict(state)
    train(side, net, dtype=None)


@feature("init", "gathered_values")
def gathered(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        run_steps(trainer, range(step, step + 1))
        with zlaunch.zero.GatheredParameters(trainer.module.layers[1].up.weight):
            side.record(f"weight {step}", trainer.module.layers[1].up.weight)


@feature("init", "gathered_nested")
def gathered_nested(side: Side) -> None:
    trainer = train(side, Stack(), steps=2)
    layer = trainer.module.layers[1]
    with zlaunch.zero.GatheredParameters(layer.up.weight):
        with zlaunch.zero.GatheredParameters(list(layer.parameters())):
            side.record("inner", layer.down.weight)
        side.record("outer", layer.up.weight)
    run_steps(trainer, range(2, 4))


@feature("init", "gathered_around_a_pass")
def gathered_around(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        with zlaunch.zero.GatheredParameters(list(trainer.module.parameters())):
            loss = squared(trainer.call(side.share(floats(step)[0])))
            trainer.backward(loss)
        trainer.step()


@feature("init", "gathered_between_forward_and_backward")
def gathered_between(side: Side) -> None:
    trainer = side.start(Stack())
    for step in range(3):
        loss = squared(trainer.call(side.share(floats(step)[0])))
        with zlaunch.zero.GatheredParameters(list(trainer.module.parameters())):
            side.record(f"weight {step}", trainer.module.layers[1].up.weight)
        trainer.backward(loss)
        trainer.step()


@feature("init", "changed_by_the_other_rank")
def other_rank(side: Side) -> None:
    trainer = train(side, Stack(), steps=2)
    weight = trainer.module.layers[1].up.weight
    with zlaunch.zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
        if side.is_plain or side.rank == 1:
            weight.mul_(0.5)
    run_steps(trainer, range(2, 4))


@feature("init", "copied_before_initialize")
def copied(side: Side) -> None:
    first = Stack()
    second = copy.deepcopy(first)
    train(side, first, steps=2)
    train(side, second, steps=3)


@feature("init", "copied_after_initialize", stages=(0, 1, 2))
def copied_after(side: Side) -> None:
    trainer = train(side, Stack(), steps=2)
    twin = copy.deepcopy(trainer.module)
    run_steps(trainer, range(2, 4))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        squared(twin(floats(step)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in twin.state_dict().items():
        side.record(f"twin {name}", value)


@feature("init", "initialized_again_after_destroy")
def again(side: Side) -> None:
    net = Stack().double()
    for part in range(3):
        trainer = side.start(net)
        run_steps(trainer, range(part, part + 2))
        side.record_mean(f"part {part}", squared(trainer.call(side.share(floats(9)[0]))))
        if not side.is_plain:
            trainer.call.destroy()
            side.trainers.remove(trainer)
    for name, value in net.state_dict().items():
        side.record(name, value)
    side.trainers.clear()


@feature("init", "trained_by_plain_torch_after_destroy")
def plain_after(side: Side) -> None:
    net = Stack().double()
    trainer = train(side, net, steps=2)
    if not side.is_plain:
        trainer.call.destroy()
    side.trainers.clear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        squared(net(floats(step)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in net.state_dict().items():
        side.record(name, value)


@feature("init", "taken_over_by_a_second_initialize", may_refuse="already belong.*destroy")
def taken_over(side: Side) -> None:
    net = Stack().double()
    train(side, net, steps=2)
    train(side, net, steps=2)
    side.trainers.pop(0)


@feature("init", "trained_by_plain_torch_before")
def plain_before(side: Side) -> None:
    net = Stack().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        squared(net(floats(step)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(side, net)


@feature("init", "built_in_evaluation_mode_and_under_no_grad")
def built_under_no_grad(side: Side) -> None:
    with torch.no_grad():
        net = Stack().eval()
    train(side, net)


@feature("init", "engine_is_dropped_and_the_model_kept")
def dropped(side: Side) -> None:
    trainer = train(side, Stack(), steps=2)
    net = trainer.module
    with torch.no_grad():
        side.record_share("output", net(side.share(floats(9)[0])))
    side.record("parameters", sum(p.numel() for p in net.parameters()))


@feature("init", "large_units_and_small_ones")
def persistent(side: Side) -> None:
    """Leave small parameters whole and shard the others."""
    train(side, Stack(), zero={"stage3_param_persistence_threshold": 100})


@feature("init", "everything_persistent")
def all_persistent(side: Side) -> None:
    train(side, Stack(), zero={"stage3_param_persistence_threshold": 10**6})


@feature("init", "without_prefetch_and_with_few_live_parameters")
def few_live(side: Side) -> None:
    train(side, Stack(), zero={"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0})


@feature("init", "one_large_bucket")
def large_bucket(side: Side) -> None:
    train(side, Stack(), zero={"reduce_bucket_size": 10**8})


@feature("init", "tiny_bucket")
def tiny_bucket(side: Side) -> None:
    train(side, Stack(), zero={"reduce_bucket_size": 10})


@feature("init", "leaf_modules")
def leaf(side: Side) -> None:
    train(side, Stack(), zero={"leaf_module": {"names": ["layers"]}})
