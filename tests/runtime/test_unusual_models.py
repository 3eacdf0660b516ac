"""Test models that are not a plain stack: each case trains like plain torch under every stage.

It runs in double precision, where Adam does not blow rounding up, so that the comparison can be sharp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.models import (
    Layer,
    Net,
    batches,
    config,
    loss_of,
    net,
    relative_error,
    train_engine,
    train_plain,
    with_forward,
)
from tests.runtime.workers import join, run_workers

TOLERANCE = 1e-9


def frozen_lora() -> nn.Module:
    """Frozen base weights with small trainable ones beside them in every layer."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Linear(base.in_features, 4, bias=False)
            self.b = nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    model = net()
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.layers:
        layer.up, layer.down = Lora(layer.up), Lora(layer.down)
    return model


def tied() -> nn.Module:
    return net(tied=True)


def unused() -> nn.Module:
    model = net()
    model.layers.insert(1, Layer(24))  # one whole block and one parameter that no forward touches
    model.never = nn.Parameter(torch.ones(40, 40))
    whole = model.layers

    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for index, layer in enumerate(whole):
            if index != 1:
                x = layer(x)
        return model.head(model.norm(x))

    return with_forward(model, forward)


def used_by_another() -> nn.Module:
    """The head is the embedding's weight, taken without any module owning it twice."""
    model = net()
    del model.head

    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for layer in model.layers:
            x = layer(x) * model.layers[0].up.bias[0]
        return nn.functional.linear(model.norm(x), model.embedding.weight)

    return with_forward(model, forward)


def changing_order() -> nn.Module:
    model = net(depth=4)
    calls = [0]

    def forward(tokens: Tensor) -> Tensor:
        calls[0] += 1
        x = model.embedding(tokens)
        layers = list(model.layers)
        order = layers[::-1] if calls[0] % 3 == 0 else layers[:-1] if calls[0] % 3 == 1 else layers
        for layer in order:
            x = layer(x)
        return model.head(model.norm(x))

    return with_forward(model, forward)


def _checkpointed(reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = net()

        def forward(tokens: Tensor) -> Tensor:
            x = model.embedding(tokens)
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x = checkpoint(
                lambda y: model.layers[0](model.layers[1](y)), x, use_reentrant=reentrant
            )  # and used again
            return model.head(model.norm(x))

        return with_forward(model, forward)

    return build


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Wrapped(nn.Module):
    """A layer that returns its result in some structure."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.kind == "tuple":
            return (y, None, 3)
        if self.kind == "dict":
            return {"y": y, "note": "text"}
        if self.kind == "view":
            return y[:]
        return Output(y)


def _structured(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = net()
        model.layers = nn.ModuleList(Wrapped(layer, kind) for layer in model.layers)

        def forward(tokens: Tensor) -> Tensor:
            x = model.embedding(tokens)
            for layer in model.layers:
                out = layer(x)
                x = {"tuple": lambda o: o[0], "dict": lambda o: o["y"], "dataclass": lambda o: o.hidden}.get(
                    kind, lambda o: o
                )(out)
                if kind == "view":
                    x.mul_(0.5)  # in place on the view that the hook was put on
            return model.head(model.norm(x))

        return with_forward(model, forward)

    return build


def odd_sizes() -> nn.Module:
    """Sizes that no world size divides, an empty parameter, a scalar and a buffer in use."""
    model: Any = net(width=23, depth=3)
    model.empty = nn.Parameter(torch.zeros(0, 5))
    model.gain = nn.Parameter(torch.tensor(0.7))
    model.register_buffer("shift", torch.full((23,), 0.1))

    def forward(tokens: Tensor) -> Tensor:
        x = (model.embedding(tokens) + model.shift) * model.gain + model.empty.sum()
        for layer in model.layers:
            x = layer(x)
        return model.head(model.norm(x))

    return with_forward(model, forward)


def compiled_blocks() -> nn.Module:
    model = net()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "frozen_lora": frozen_lora,
    "tied": tied,
    "unused": unused,
    "used_by_another": used_by_another,
    "changing_order": changing_order,
    "checkpoint_reentrant": _checkpointed(True),
    "checkpoint_non_reentrant": _checkpointed(False),
    "output_tuple": _structured("tuple"),
    "output_dict": _structured("dict"),
    "output_dataclass": _structured("dataclass"),
    "output_view_in_place": _structured("view"),
    "odd_sizes": odd_sizes,
    "compiled_blocks": compiled_blocks,
}


def _errors(case: str) -> dict[str, float]:
    """Worst relative error after 5 steps, per stage and accumulation."""
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    worst = {}
    for accumulation in (1, 2):
        if accumulation > 1 and case == "changing_order":
            continue  # the plain loop would see another order of calls
        data = batches(5, 4 * accumulation)
        torch.manual_seed(7)
        plain: Any = CASES[case]().double()
        initial = {name: value.clone() for name, value in plain.state_dict().items()}
        optimizer = torch.optim.AdamW(
            [p for p in plain.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1
        )
        train_plain(plain, data, optimizer=optimizer)
        for stage in range(4):
            model: Any = CASES[case]().double()
            model.load_state_dict(initial)
            if case == "odd_sizes":
                model.shift.add_(torch.distributed.get_rank())  # rank 0's value must win
            engine, *_ = zlaunch.initialize(
                model=model,
                config=config(
                    stage, 4 // world, accumulation, zero={"stage3_module_granularity_threshold": 0}
                ),
            )
            train_engine(engine, data)
            state, wanted = model.state_dict(), plain.state_dict()
            errors = [relative_error(state[n], wanted[n]) for n in wanted if wanted[n].numel()]
            worst[f"stage {stage} accumulation {accumulation}"] = max(errors)
            engine.destroy()
    return worst


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.exhaustive) if c == "compiled_blocks" else c for c in CASES],
)
def test_trains_like_plain_torch(case: str) -> None:
    for worst in run_workers(_errors, 2, case):
        assert {name: error for name, error in worst.items() if not error <= TOLERANCE} == {}


def _several_forwards(stage: int) -> float:
    """Two forwards summed before one backward, then two backwards before one step."""
    rank = torch.distributed.get_rank()
    plain = net().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    engine, *_ = zlaunch.initialize(model=net().double(), config=config(stage, 2))
    for first, second in zip(batches(6, 4), batches(6, 4)[::-1], strict=True):
        (loss_of(plain, first) + 2 * loss_of(plain, second)).backward()
        loss_of(plain, second).backward()
        optimizer.step()
        optimizer.zero_grad()
        mine, other = first.chunk(2)[rank], second.chunk(2)[rank]
        (loss_of(engine, mine) + 2 * loss_of(engine, other)).backward()  # straight on the loss
        engine.backward(loss_of(engine, other))
        engine.step()
    engine.destroy()
    state, wanted = engine.module.state_dict(), plain.state_dict()
    return max(relative_error(state[n], wanted[n]) for n in wanted)


def _at_every_stage() -> dict[int, float]:
    join()
    return {stage: _several_forwards(stage) for stage in (0, 1, 2, 3)}


@pytest.mark.rotated
def test_several_forwards_and_backwards_in_one_step() -> None:
    for errors in run_workers(_at_every_stage, 2):
        assert {stage: error for stage, error in errors.items() if not error <= TOLERANCE} == {}


def _two_models() -> float:
    """Two engines at different stages whose losses meet in one backward pass."""
    rank = join()
    a, b = net().double(), net(depth=2).double()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, weight_decay=0.1) for m in (a, b)]
    first, *_ = zlaunch.initialize(model=net().double(), config=config(3, 2))
    second, *_ = zlaunch.initialize(model=net(depth=2).double(), config=config(1, 2))
    for batch in batches(6, 4):
        (loss_of(a, batch) + loss_of(b, batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mine = batch.chunk(2)[rank]
        (loss_of(first, mine) + loss_of(second, mine)).backward()
        first.step()
        second.step()
    pairs = [(first, a), (second, b)]
    errors = [(e.module.state_dict(), m.state_dict()) for e, m in pairs]
    return max(relative_error(got[n], want[n]) for got, want in errors for n in want)


def test_two_models_in_one_process() -> None:
    assert max(run_workers(_two_models, 2)) <= TOLERANCE


def _groups_and_schedule(stage: int) -> tuple[float, list[float]]:
    """A client optimizer with two groups of their own rates, and a torch scheduler."""
    rank = join()

    def build(model: Net) -> tuple[torch.optim.Optimizer, Any]:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        plain = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 1e-2}]
        optimizer = torch.optim.SGD(groups, lr=3e-2, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    plain, model = net().double(), net().double()
    optimizer, scheduler = build(plain)
    client, client_scheduler = build(model)
    settings = {k: v for k, v in config(stage, 2).items() if k != "optimizer"}
    engine, returned, _, _ = zlaunch.initialize(
        model=model,
        optimizer=client,
        lr_scheduler=client_scheduler,
        config={**settings, "zero_allow_untested_optimizer": True},
    )
    assert returned is client
    for batch in batches(8, 4):
        loss_of(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        engine.backward(loss_of(engine, batch.chunk(2)[rank]))
        engine.step()
    with pytest.raises(RuntimeError, match="without a backward pass"):
        client.step()  # it is engine.step()
    state, wanted = engine.module.state_dict(), plain.state_dict()
    return max(relative_error(state[n], wanted[n]) for n in wanted), [g["lr"] for g in client.param_groups]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_param_groups_of_a_client_optimizer(stage: int) -> None:
    for error, rates in run_workers(_groups_and_schedule, 2, stage):
        assert error <= TOLERANCE
        assert rates == pytest.approx([3e-2 / 4, 1e-2 / 4])
