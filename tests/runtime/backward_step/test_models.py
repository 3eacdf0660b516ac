"""Test models, loops and layouts with steps inside the backward pass beside ordinary steps or plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zlaunch
from tests.runtime.backward_step.test_equality import SAMPLES, engine_of, error, settings
from tests.runtime.mesh.nodes import join_nodes
from tests.runtime.models import Layer, batches, loss_of, net, train_engine, train_plain, with_forward
from tests.runtime.workers import join, run_workers

STEPS, TOLERANCE = 6, 1e-9


class Odd(nn.Module):
    """Has a tied head, a layer that is used twice, a frozen layer between trained ones, one that is left out
    in every other pass and one that is never used.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 24)
        self.layers: Any = nn.ModuleList(Layer(24) for _ in range(4))
        self.shared, self.never = Layer(24), Layer(24)
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(24, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant, self.passes = reentrant, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        self.passes += 1
        for index, layer in enumerate(self.layers):
            if index == 2 and self.passes % 2:
                continue
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            if index % 2:
                x = self.shared(x)
        found: Tensor = self.head(x)
        return found


def odd(reentrant: bool | None) -> Odd:
    torch.manual_seed(5)
    return Odd(reentrant).double()


def _odd() -> dict[str, float]:
    join()
    found = {}
    for stage in (2, 3):
        for reentrant in (None, False, True):
            plain, engine = odd(reentrant), engine_of(odd(reentrant), stage)
            train_plain(plain, batches(STEPS, SAMPLES))
            train_engine(engine, batches(STEPS, SAMPLES))
            found[f"{stage} {reentrant}"] = error(engine, plain)
            engine.destroy()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_tied_shared_frozen_and_unused_layers(world: int) -> None:
    for found in run_workers(_odd, world):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _some_use_it() -> float:
    """One rank leaves a layer out that the other uses."""
    rank = join()

    def skipping(model: Any, skips: bool) -> Any:
        def forward(tokens: Tensor) -> Tensor:
            x = model.embedding(tokens)
            for index, layer in enumerate(model.layers):
                x = x if index == 1 and skips else layer(x)
            return model.head(model.norm(x))

        return with_forward(model, forward)

    engine = engine_of(skipping(net().double(), rank == 1), 2)
    plain = net().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    for batch in batches(STEPS, SAMPLES):
        for skips, part in enumerate(batch.chunk(2)):
            (loss_of(skipping(plain, bool(skips)), part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        train_engine(engine, [batch])
    return error(engine, plain)


def test_a_layer_that_only_one_rank_uses() -> None:
    assert max(run_workers(_some_use_it, 2)) <= TOLERANCE


def _groups(model: Any) -> list[dict[str, Any]]:
    layers = list(model.layers.parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in layers)]
    return [{"params": layers, "lr": 1e-2}, {"params": rest, "lr": 1e-3, "weight_decay": 0.0}]


def _schedule() -> float:
    join()
    plain = net().double()
    engine_model = net().double()
    optimizers = [torch.optim.AdamW(_groups(model)) for model in (plain, engine_model)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    options = settings(3)
    del options["optimizer"]
    engine, *_ = zlaunch.initialize(
        model=engine_model, optimizer=optimizers[1], lr_scheduler=schedulers[1], config=options
    )
    for batch in batches(STEPS, SAMPLES):
        train_plain(plain, [batch], optimizer=optimizers[0])
        schedulers[0].step()
        train_engine(engine, [batch])
    assert engine.get_lr() == schedulers[0].get_last_lr()
    return error(engine, plain)


def test_groups_with_their_rates_and_a_scheduler() -> None:
    assert max(run_workers(_schedule, 2)) <= TOLERANCE


def _unfreeze() -> float:
    join()
    plain, model = net().double(), net().double()
    for each in (plain, model):
        each.layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    engine = engine_of(model, 3)
    first, last = batches(STEPS, SAMPLES)[:3], batches(STEPS, SAMPLES)[3:]
    train_plain(plain, first, optimizer=optimizer)
    train_engine(engine, first)
    plain.layers[1].requires_grad_(True)
    model.layers[1].requires_grad_(True)
    train_plain(plain, last, optimizer=optimizer)
    train_engine(engine, last)
    return error(engine, plain)


def test_parameters_that_are_unfrozen_later() -> None:
    assert max(run_workers(_unfreeze, 2)) <= TOLERANCE


def _resume(folder: str) -> dict[str, float]:
    join()
    found = {}
    for stage in (2, 3):
        whole = engine_of(net().double(), stage, 0.3)
        train_engine(whole, batches(STEPS, SAMPLES))
        first = engine_of(net().double(), stage, 0.3)
        train_engine(first, batches(STEPS, SAMPLES)[:3])
        first.save_checkpoint(f"{folder}/{stage}")
        second = engine_of(net().double(), 5 - stage, 0.3)
        second.load_checkpoint(f"{folder}/{stage}")
        train_engine(second, batches(STEPS, SAMPLES)[3:])
        with torch.no_grad():
            loss_of(second, batches(1, 2)[0])
        plain = net().double()
        plain.load_state_dict(whole.module.state_dict())
        found[f"{stage}"] = error(second, plain)
    return found


@pytest.mark.rotated
def test_a_resumed_run_goes_on_with_the_norm_of_the_step_before(tmp_path: Path) -> None:
    for found in run_workers(_resume, 2, str(tmp_path)):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _adversaries(stepping: bool) -> list[dict[str, Tensor]]:
    """Train a generator against a discriminator, which is frozen in the generator's pass."""
    join()
    torch.manual_seed(8)
    models = [nn.Sequential(nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 70)).double() for _ in range(2)]
    config = settings(3, step_in_backward=stepping)
    maker, judge = (zlaunch.initialize(model=model, config=config)[0] for model in models)
    noise = torch.Generator().manual_seed(3 + torch.distributed.get_rank())
    for _ in range(STEPS):
        real, z = (torch.randn(4, 70, generator=noise, dtype=torch.float64) for _ in range(2))
        judge.backward(judge(real).square().mean() - judge(maker(z).detach()).tanh().mean())
        judge.step()
        models[1].requires_grad_(False)
        maker.backward(judge(maker(z)).square().mean())
        maker.step()
        models[1].requires_grad_(True)
    return [dict(engine.module.state_dict()) for engine in (maker, judge)]


def test_two_engines_that_train_against_each_other() -> None:
    for own, wanted in zip(
        run_workers(_adversaries, 2, True), run_workers(_adversaries, 2, False), strict=True
    ):
        for found, other in zip(own, wanted, strict=True):
            for name, value in other.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def _groups_of_ranks(zero: dict[str, Any]) -> dict[str, float]:
    join_nodes(2)
    found = {}
    plain = net().double()
    train_plain(plain, batches(STEPS, SAMPLES))
    for stage in (2, 3):
        engine = engine_of(net().double(), stage, **zero)
        train_engine(engine, batches(STEPS, SAMPLES))
        found[f"{stage}"] = error(engine, plain)
        engine.destroy()
    return found


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [{"shard_group": "node"}, {"zero_hpz_partition_size": 2}], ids=str)
def test_units_that_are_sharded_over_groups(zero: dict[str, Any]) -> None:
    for found in run_workers(_groups_of_ranks, 4, zero):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _tensor(world: int, clip: float) -> dict[str, Tensor]:
    join()
    tensor = 2 if world > 1 else 1
    options = settings(3, clip)
    options["train_micro_batch_size_per_gpu"] = SAMPLES * tensor // world
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    if tensor > 1:
        options |= {"parallel": {"tensor": tensor}, "tensor_parallel": {"plan": plan}}
    engine, *_ = zlaunch.initialize(model=net().double(), config=options)
    position, size = torch.distributed.get_rank() // tensor, world // tensor
    for batch in batches(STEPS, SAMPLES):
        engine.backward(loss_of(engine, batch.chunk(size)[position]))
        engine.step()
    return dict(engine.module.state_dict())


@pytest.mark.rotated
def test_layers_that_ranks_share() -> None:
    """Without the rule of the first step: the units of a rank are others there."""
    (wanted,) = run_workers(_tensor, 1, 1, 0.0)
    for found in run_workers(_tensor, 4, 4, 0.0):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
